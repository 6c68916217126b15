"""Instructions, and the program of them that one rank executes in one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from pipec.ir.values import Link, Phase


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
    def traits(self) -> "Traits":
        return TRAITS[self]

    @property
    def phase(self) -> Phase | None:
        """The phase that a compute runs; None for every other op."""
        return TRAITS[self].phase


class Kind(Enum):
    """The kinds of ops, in the order in which they stand around one compute of a program."""

    RECEIVE = "receive"
    COMPUTE = "compute"
    SEND = "send"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Traits:
    """What is true of an op, for code that treats several ops alike.

    ``phase`` is the phase that a compute runs; other kinds have none. An op that is ``timed`` is an event of
    a timeline. An op that ``carries_link`` moves the values of a link. If it ``has_peer``, another rank takes
    part. If it ``fills_slot``, it puts what a microbatch receives into a buffer slot.
    """

    kind: Kind
    phase: Phase | None = None
    timed: bool = False
    carries_link: bool = False
    has_peer: bool = False
    fills_slot: bool = False


TRAITS: Mapping[Op, Traits] = {
    Op.RECV: Traits(Kind.RECEIVE, carries_link=True, has_peer=True, fills_slot=True),
    Op.SEND: Traits(Kind.SEND, timed=True, carries_link=True, has_peer=True),
    Op.MOVE: Traits(Kind.SEND, carries_link=True, fills_slot=True),
    Op.FREE: Traits(Kind.RELEASE),
    **{Op(phase): Traits(Kind.COMPUTE, phase=phase, timed=True) for phase in Phase},
}
"""Everything that is known of ops. A new op is a row here."""


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
    """What one rank executes in one step. Every peer, slot and microbatch is resolved."""

    rank: int
    instructions: Sequence[Instruction]
