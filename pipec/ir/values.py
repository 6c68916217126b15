"""Values of a cut graph, the links that carry them between stages, and the phases in which nodes run."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pipec.ir.batch_axis import BatchAxis

Dim = int | str
"""A dimension: a number, or an integer expression such as ``"128*b"``.

Its names are ``b``, the microbatch size, and those of the plan's variables.
"""

Sizes = Mapping[str, int | float]
"""The values of names in dimensions and in code. Those in dimensions are integers."""


class Phase(StrEnum):
    """The phase of a node of the training graph. A schedule runs ``BACKWARD`` or its two halves.

    The ``TAIL`` is no compute of a schedule: a stage runs it once a step, of the rows of all microbatches.
    """

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    TAIL = "tail"


SCHEDULED_PHASES = tuple(phase for phase in Phase if phase is not Phase.TAIL)
"""The phases that run for each microbatch."""

GRADIENT_PHASES = (Phase.BACKWARD, Phase.BACKWARD_WEIGHT)
"""The phases at whose end the gradients of parameters are complete."""


def function_names(phase: Phase, num_segments: int) -> tuple[str, ...]:
    """The names of the functions of a phase in generated code, in the order in which they run.

    A phase is one function, ``backward``, or runs in segments: ``backward_0``, ``backward_1`` and so on.
    """
    return (str(phase),) if num_segments == 1 else tuple(f"{phase}_{part}" for part in range(num_segments))


class Mode(StrEnum):
    """What a program computes: a training step, the loss alone, or the model's output.

    With ``OUTPUTS`` a program computes the output, and later the gradients of parameters from those of the
    output: the script computes the loss in between.
    """

    TRAIN = "train"
    OUTPUTS = "outputs"
    LOSS = "loss"
    FORWARD = "forward"

    @property
    def trains(self) -> bool:
        """Whether a program computes gradients of parameters."""
        return self in (Mode.TRAIN, Mode.OUTPUTS)

    @property
    def has_loss(self) -> bool:
        """Whether the loss is the first result."""
        return self in (Mode.TRAIN, Mode.LOSS)


class Precision(StrEnum):
    """The precision of operators with float32 weights, as ``torch.autocast`` chooses it."""

    BF16 = "bf16-mixed"
    FP16 = "fp16-mixed"


class Payload(StrEnum):
    """The kind of values of a link. The first three move once per microbatch, the others once per step."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    MICROBATCH_RESULT = "microbatch_result"
    WEIGHT = "weight"
    WEIGHT_GRADIENT = "weight_gradient"
    RESULT = "result"

    @property
    def per_microbatch(self) -> bool:
        return self.feeds_compute or self is Payload.MICROBATCH_RESULT

    @property
    def is_result(self) -> bool:
        """Whether no compute reads it; ranks receive it for the script."""
        return self in (Payload.MICROBATCH_RESULT, Payload.RESULT)

    @property
    def feeds_compute(self) -> bool:
        """Whether one compute makes it, and another one reads it, for a microbatch."""
        return self in (Payload.ACTIVATION, Payload.GRADIENT)

    @property
    def producers(self) -> tuple[Phase, ...]:
        """The phases of the source stage that may make the values; none for weights."""
        match self:
            case Payload.ACTIVATION | Payload.MICROBATCH_RESULT | Payload.RESULT:
                return (Phase.FORWARD,)
            case Payload.GRADIENT:
                return (Phase.BACKWARD, Phase.BACKWARD_INPUT)
            case Payload.WEIGHT_GRADIENT:
                return (Phase.BACKWARD, Phase.BACKWARD_WEIGHT)
            case Payload.WEIGHT:
                return ()

    @property
    def readers(self) -> tuple[Phase, ...]:
        """The phases of the target stage that wait for the values; none if they are read at the end."""
        match self:
            case Payload.ACTIVATION | Payload.WEIGHT:
                return (Phase.FORWARD,)
            case Payload.GRADIENT:
                return (Phase.BACKWARD, Phase.BACKWARD_INPUT)
            case Payload.WEIGHT_GRADIENT | Payload.MICROBATCH_RESULT | Payload.RESULT:
                return ()


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a function returns. ``dtype`` is torch's name without the prefix."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A size that changes from call to call: dimension ``dim`` of leaf ``position`` of the arguments.

    If ``dim`` is None, the leaf itself is a number that changes. ``name`` denotes the size or the number in
    shapes and in code. Dimensions with one name have one size. For a leaf that is split, ``dim`` counts the
    dimensions with its rows first; ``axis`` is the user's batch axis.
    """

    name: str
    position: int
    path: str
    dim: int | None
    axis: BatchAxis | None = None

    @property
    def what(self) -> str:
        """``dimension 1 of kwargs['input_ids']``"""
        return self.path if self.dim is None else f"{self.size} of {self.path}"

    @property
    def size(self) -> str:
        """``dimension 1``, if it is no number"""
        return self.axis.dim_name(self.dim) if self.axis and self.dim else f"dimension {self.dim}"


@dataclass(frozen=True, slots=True)
class Link:
    """Values that travel together from one stage to another.

    ``WEIGHT`` links carry a tied parameter from the stage that owns it to a stage that borrows it,
    ``WEIGHT_GRADIENT`` links carry its gradient back; ``RESULT`` links carry the loss or the outputs of
    ``source`` to every other rank, and have ``target`` -1, or to the other ranks of ``target``. In an
    asynchronous schedule ``MICROBATCH_RESULT`` links carry them to every other rank for each microbatch.
    """

    source: int
    target: int
    payload: Payload
    values: tuple[Value, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.values)

    @property
    def is_broadcast(self) -> bool:
        """Whether the values go to every other rank."""
        return self.payload.is_result and self.target < 0


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """A leaf of ``step``'s arguments that some stage reads; ``position`` counts the flattened leaves.

    ``batched``: its rows, which are dimension 0 of ``value``, are split into microbatches; otherwise every
    microbatch gets the whole tensor.
    """

    position: int
    path: str
    batched: bool
    value: Value
