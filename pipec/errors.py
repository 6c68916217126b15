"""Everything pipec raises on purpose: what was wrong, where, what was expected and what to do."""

DAMAGED_DATA_ERRORS = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(RecursionError, MemoryError),
)
"""What Python raises where data are damaged, of other types than expected, or nested too deeply."""


class PipecError(Exception):
    """Any error of pipec's own."""


class CaptureError(PipecError):
    """The model cannot be captured as one graph."""


class InputError(PipecError, ValueError):
    """A call's arguments do not fit: wrong shape, dtype, batch size, device count or name."""


class MixedRowsError(InputError):
    """Rows of the batch depend on one another, so that microbatches do not make what the batch would."""


class TargetRowsError(InputError):
    """The target has another number of rows than the batch."""


class PlanError(PipecError):
    """No plan can be made from what was requested."""


class InfeasibleError(PlanError):
    """A plan exists on paper but breaks a limit, such as a device's memory."""


class VerifyError(PipecError):
    """A graph, schedule or program breaks a rule that must always hold."""


class ArtifactError(PipecError):
    """A saved artifact, program text or profile is corrupted, foreign or of another version."""


class CheckpointError(PipecError):
    """A checkpoint is damaged, incomplete, of another training run, or cannot be written."""


class ExecutionError(PipecError):
    """An instruction failed while a program ran. ``__cause__`` is the original error."""


class BranchError(PipecError):
    """A branch of the model asks for values of tensors, and goes another way than when it was captured."""


class NonFiniteError(ExecutionError):
    """A loss is NaN, or a gradient is not finite, and ``on_nan`` is "raise". Every rank raises it."""


class TransportError(PipecError):
    """A message could not be delivered: a peer failed, hung or holds another plan."""
