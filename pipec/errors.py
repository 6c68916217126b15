"""Everything pipec raises on purpose: what was wrong, where, what was expected and what to do."""

DAMAGED_DATA_ERRORS = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(RecursionError, MemoryError),
)
"""Python's errors for data that are damaged, of unexpected types, or nested too deeply."""


class PipecError(Exception):
    """Any error of pipec's own."""


class PipecWarning(UserWarning):
    """Results may differ from what the script expects. ``-W error::pipec.errors.PipecWarning`` stops there."""


class CaptureError(PipecError):
    """The model cannot be captured as one graph."""


class InputError(PipecError, ValueError):
    """The arguments of a call are wrong: wrong shape, dtype, batch size, device count or name."""


class MixedRowsError(InputError):
    """Rows of the batch depend on each other, so microbatches would not give the batch's results."""


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
    """A branch on values of tensors goes another way than when the model was captured."""


class NonFiniteError(ExecutionError):
    """A loss is NaN, or a gradient is not finite, and ``on_nan`` is "raise". Every rank raises it."""


class TransportError(PipecError):
    """A message could not be delivered: a peer failed, hung or holds another plan."""
