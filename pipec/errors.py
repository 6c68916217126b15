"""Everything pipec raises on purpose: what was wrong, where, what was expected and what to do."""

from types import TracebackType

DAMAGED_DATA_ERRORS = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(RecursionError, MemoryError),
)
"""Python's errors for data that are damaged, of unexpected types, or nested too deeply."""


class PipecError(Exception):
    """Any error of pipec's own."""


class PipecWarning(UserWarning):
    """Results may differ from what a script expects.

    ``warnings.simplefilter("error", pipec.PipecWarning)`` in the script makes it an error. Python ignores the
    class as a value of ``-W``, because it reads that before it can import pipec.
    """


class CaptureError(PipecError):
    """The model cannot be captured as one graph."""


class UnsupportedTorchError(PipecError):
    """The installed torch is not as pipec knows it: a part that pipec uses is gone or has changed."""


class InputError(PipecError, ValueError):
    """The arguments of a call are wrong: wrong shape, dtype, batch size, device count or name."""


class FailingModelError(InputError):
    """The model or the loss function fails on the arguments of a microbatch, as it would in eager torch.

    ``what`` says where, and with which error.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}\n{remedy}".strip())
        self.what = what


class NoLossError(InputError):
    """The model returns nothing that can be its loss, or of which a loss could be that trains it."""


class MixedRowsError(InputError):
    """Rows of the batch depend on each other, so microbatches would not give the batch's results."""


class UnequalStepError(MixedRowsError):
    """A few rows in microbatches were run, and did not give what the model computes of them at once."""


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


def trim_traceback(error: BaseException | None) -> None:
    """Leave in the traceback of an error, and of its causes, the frames of scripts and models alone.

    The causes of a CaptureError or InputError that torch defines, as Dynamo's, are left out: ours say what is
    to be known of them.
    """
    says_all = isinstance(error, CaptureError | InputError)
    while error is not None:
        error.__traceback__ = _of_scripts(error.__traceback__)
        cause = _cause(error)
        while says_all and cause is not None and type(cause).__module__.startswith("torch."):
            cause = _cause(cause)
        error.__cause__ = cause
        error = cause


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _of_scripts(traceback: TracebackType | None) -> TracebackType | None:
    frames = []
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        if module not in ("pipec", "torch", "contextlib"):
            frames.append(traceback)
        traceback = traceback.tb_next
    trimmed = None
    for each in reversed(frames):
        trimmed = TracebackType(trimmed, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trimmed
