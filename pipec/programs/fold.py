"""The round of programs without end, found in programs that were lowered for a number of microbatches.

Once the pipeline is full, a rank does the same again and again, each time for the microbatches of the next
mini-batch. That stretch of its program is the round. With the instructions left out whose microbatches do
not exist, it is a program for any number of them; ``verify_rounds`` proves that.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from pipec.errors import VerifyError
from pipec.ir import Ending, Link, Program, Schedule
from pipec.ir.columns import OP_CODE, Instructions
from pipec.ir.program import Instruction, Op
from pipec.ir.rounds import unrolled, window_of
from pipec.programs.lower import lower

_MORE = 4
"""So many more mini-batches than fill the pipeline are lowered, for a round to begin and end among them."""


def fold(
    schedule: Schedule, links: Sequence[Link], recompute: Collection[int], ending: Ending
) -> tuple[Program, ...]:
    """The round of each rank, of a schedule for ``num_to_lower`` microbatches or more."""
    assert schedule.stream is not None
    programs = lower(schedule, links, recompute, ending)
    return tuple(_round(program, schedule.stream.microbatches) for program in programs)


def num_to_lower(num_stages: int, per_batch: int) -> int:
    """How many microbatches a schedule has in which rounds can be found."""
    filling = -(-num_stages // per_batch)
    return per_batch * (2 * filling + _MORE)


def _round(program: Program, period: int) -> Program:
    """A stretch between two forwards that are a mini-batch apart, behind the first version's last reader."""
    columns = program.instructions
    assert isinstance(columns, Instructions)
    forwards = np.flatnonzero(columns.ops == OP_CODE[Op.FORWARD])
    everything = _kinds(columns)
    for number in range(0, forwards.size - 2 * period, period):
        first, middle, last = forwards[[number, number + period, number + 2 * period]].tolist()
        body, following = columns[first:middle], columns[middle:last]
        repeats = [_further(each, period) for each in body] == list(map(_without_slot, following))
        if repeats and _kinds(body) == everything:
            return _with_slots(Program(program.rank, _from_the_first(body, period), period))
    raise VerifyError(
        f"the program of rank {program.rank} never does the same for one mini-batch as for the one before; "
        "expected a schedule that goes on without end"
    )


def _kinds(instructions: Sequence[Instruction]) -> set[tuple[object, ...]]:
    """What a program does, whichever microbatch it is for.

    A value that skips stages is received far ahead, so that a stretch without its receive may repeat as well.
    """
    return {(each.op, each.stage, each.link, each.bucket) for each in instructions}


def _further(instruction: Instruction, microbatches: int) -> Instruction:
    """The same a mini-batch further."""
    version = instruction.version + (1 if instruction.version >= 0 else 0)
    moved = replace(instruction, microbatch=instruction.microbatch + microbatches, version=version)
    return _without_slot(moved)


def _without_slot(instruction: Instruction) -> Instruction:
    return replace(instruction, slot=min(instruction.slot, 0))


def _from_the_first(body: Sequence[Instruction], period: int) -> tuple[Instruction, ...]:
    """The round as early as it can name its microbatches and versions."""
    named = min(each.microbatch for each in body) // period
    versions = min(each.version for each in body if each.version >= 0)
    earlier = min(named, versions)
    return tuple(
        replace(
            each,
            microbatch=each.microbatch - earlier * period,
            version=each.version - earlier if each.version >= 0 else -1,
        )
        for each in body
    )


def _with_slots(program: Program) -> Program:
    window = window_of(program)
    slotted = (
        replace(each, slot=each.microbatch % window) if each.slot >= 0 else each
        for each in program.instructions
    )
    return replace(program, instructions=tuple(slotted))


def excerpt(programs: Sequence[Program], num_stages: int) -> Sequence[Program]:
    """Programs as they are simulated and drawn: rounds written out until the steady state is seen.

    Programs of a step are returned as they are.
    """
    return [
        unrolled(each, num_to_lower(num_stages, each.period)) if each.period else each for each in programs
    ]
