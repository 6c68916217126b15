"""The data every part of pipec exchanges: frozen, printable, without algorithms and without torch.

Read it in the order data flows: the *values* of a cut graph, the *links* that carry them between
stages, the *stages* and the *plan* that holds them, the *schedule* that says who computes what when,
and the *instructions* of the *program* each rank executes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

Dim = int | str
"""A dimension: a number, or an integer expression in the microbatch size ``b`` such as ``"128*b"``."""


class Phase(StrEnum):
    """When a node of the training graph runs. A schedule either runs ``BACKWARD`` or its two halves."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"


class Mode(StrEnum):
    """What a program computes: a training step, the loss alone, or the model's output."""

    TRAIN = "train"
    LOSS = "loss"
    FORWARD = "forward"


class Payload(StrEnum):
    """What a link carries. The first two move once per microbatch, the others once per step."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    WEIGHT = "weight"
    WEIGHT_GRADIENT = "weight_gradient"
    RESULT = "result"

    @property
    def per_microbatch(self) -> bool:
        return self in (Payload.ACTIVATION, Payload.GRADIENT)

    @property
    def producers(self) -> tuple[Phase, ...]:
        """The phases of the source stage that may make it; none for a weight, which is there at the start."""
        match self:
            case Payload.ACTIVATION | Payload.RESULT:
                return (Phase.FORWARD,)
            case Payload.GRADIENT:
                return (Phase.BACKWARD, Phase.BACKWARD_INPUT)
            case Payload.WEIGHT_GRADIENT:
                return (Phase.BACKWARD, Phase.BACKWARD_WEIGHT)
            case Payload.WEIGHT:
                return ()

    @property
    def readers(self) -> tuple[Phase, ...]:
        """The phases of the target stage that wait for it; none for what is read when the program is over."""
        match self:
            case Payload.ACTIVATION | Payload.WEIGHT:
                return (Phase.FORWARD,)
            case Payload.GRADIENT:
                return (Phase.BACKWARD, Phase.BACKWARD_INPUT)
            case Payload.WEIGHT_GRADIENT | Payload.RESULT:
                return ()


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that leaves the function that made it. ``dtype`` is torch's name without the prefix."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """Values that travel together from one stage to another.

    ``WEIGHT`` links lend a tied parameter from the stage that owns it to a stage that borrows it,
    ``WEIGHT_GRADIENT`` links bring its gradient home; ``RESULT`` links carry the loss or the outputs
    of ``source`` to every other rank, and have ``target`` -1.
    """

    source: int
    target: int
    payload: Payload
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Input:
    """A leaf of ``step``'s arguments that some stage reads; ``position`` counts the flattened leaves.

    ``batched``: dimension 0 is the batch and is split into microbatches; otherwise every microbatch
    gets the whole tensor.
    """

    position: int
    path: str
    batched: bool
    value: Value


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage and one microbatch, in seconds and bytes. ``seconds`` has entries for the phases that run."""

    seconds: Mapping[Phase, float] = field(default_factory=dict)
    flops: float = 0.0
    parameter_bytes: int = 0
    saved_bytes: int = 0
    transient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive forward operators ``first_operator .. last_operator`` and everything they caused.

    ``parameters`` are the FQNs of ``w`` in the generated code, in order; ``borrowed`` is the subset
    owned by another stage (tied weights). ``updated_buffers`` is the subset of ``buffers`` that the
    forward replaces (BatchNorm statistics).
    """

    index: int
    first_operator: int
    last_operator: int
    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    borrowed: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    updated_buffers: tuple[str, ...] = ()
    recompute: bool = False
    cost: StageCost = StageCost()


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way to run the step that was considered, and why it was not taken.

    ``replicas`` pipelines of ``num_stages`` stages share the mini-batch, each in ``num_microbatches``.
    ``seconds`` is what the step was predicted to take, ``peak_bytes`` what the rank that needs most would.
    """

    schedule: str
    num_stages: int
    replicas: int
    num_microbatches: int
    seconds: float
    peak_bytes: int
    refused: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before code is generated. ``placement[stage]`` is the rank that runs it.

    ``outputs`` names the results in the order of the leaves of what the model returns;
    ``link_seconds[i]`` is how long ``links[i]`` takes. ``parameters`` and ``buffers`` are named by FQN.
    ``alternatives`` are there if something was left to be chosen, the fastest first.
    """

    mode: Mode
    schedule: str
    num_microbatches: int
    microbatch_size: int
    placement: tuple[int, ...]
    stages: tuple[Stage, ...]
    links: tuple[Link, ...]
    link_seconds: tuple[float, ...] = ()
    parameters: tuple[Value, ...] = ()
    buffers: tuple[Value, ...] = ()
    inputs: tuple[Input, ...] = ()
    outputs: tuple[str, ...] = ()
    dynamic_batch: bool = True
    alternatives: tuple[Alternative, ...] = ()

    @property
    def num_ranks(self) -> int:
        return max(self.placement) + 1


@dataclass(frozen=True, slots=True)
class Compute:
    """One cell of a schedule: run ``phase`` of ``stage`` on ``microbatch``."""

    phase: Phase
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each rank computes, in order, before communication is added. ``orders[rank]`` are its cells."""

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    orders: tuple[Sequence[Compute], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.placement)


class Op(StrEnum):
    """What an instruction does. The compute ops have the names of the phases they run."""

    RECV = "recv"
    SEND = "send"
    MOVE = "move"
    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    FREE = "free"

    @property
    def phase(self) -> Phase | None:
        """The phase a compute op runs; None for the others."""
        return _PHASES.get(self.value)


_PHASES = {phase.value: phase for phase in Phase}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step of a rank's program.

    ======= ==========================================================================================
    op      meaning
    ======= ==========================================================================================
    recv    post a receive of ``link`` from rank ``peer`` into buffer ``slot``; returns at once
    send    start sending ``link`` to rank ``peer``; returns at once
    move    hand ``link`` to another stage of the same rank, into buffer ``slot``
    compute run a phase of ``stage``, waiting first for the receives it reads
    free    drop what ``stage`` kept for ``microbatch``: its saved values and the slots it received into
    ======= ==========================================================================================

    ``stage`` is the stage that computes, sends, receives or frees. ``microbatch``, ``peer`` and ``slot``
    are -1 where they mean nothing; a link that moves once per step has no microbatch.
    """

    op: Op
    stage: int
    microbatch: int = -1
    link: Link | None = None
    peer: int = -1
    slot: int = -1


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank executes in one step: every peer, slot and microbatch resolved."""

    rank: int
    instructions: Sequence[Instruction]
