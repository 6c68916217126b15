"""Instructions, and the program of them that one rank executes in one step."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

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
