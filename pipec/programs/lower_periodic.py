"""Periodic programs, found in programs that were lowered for a number of microbatches.

Once the pipeline is full, a rank does the same again and again, each time for the microbatches of the next
mini-batch; where stages have replicas, of as many as bring every stage to its first replica again. That
stretch of its program is the period. With the instructions left out whose microbatches do not exist, it is a
program for any number of them; ``verify_periodic`` proves that.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from pipec.errors import VerifyError
from pipec.ir import Link, Placement, Program, Schedule, Stream, SyncSpec, replica_counts
from pipec.ir.columns import OP_CODE, InstructionColumns
from pipec.ir.periodic_program import microbatch_window, unroll
from pipec.ir.program import Instruction, Op
from pipec.ir.stream import window
from pipec.programs.lower import lower

_MORE = 4
"""So many more rounds than fill the pipeline are lowered, for one to begin and end among them."""


def lower_periodic(
    schedule: Schedule, links: Sequence[Link], recompute: Collection[int], sync_spec: SyncSpec
) -> tuple[Program, ...]:
    """The periodic programs of a schedule for ``num_microbatches_to_lower`` microbatches or more."""
    assert schedule.stream is not None
    programs = lower(schedule, links, recompute, sync_spec)
    period = schedule.stream.period(replica_counts(schedule.placement))
    return tuple(_periodic(program, period) for program in programs)


def num_microbatches_to_lower(stream: Stream, replicas: Sequence[int]) -> int:
    """How many microbatches a schedule has in which rounds can be found."""
    period = stream.period(replicas)
    filling = -(-replicas[0] * window(0, replicas) // period)
    return period * (2 * filling + _MORE)


def _periodic(program: Program, period: int) -> Program:
    """A stretch between two forwards that are a period apart, behind the first version's last reader."""
    columns = program.instructions
    assert isinstance(columns, InstructionColumns)
    forwards = np.flatnonzero(columns.ops == OP_CODE[Op.FORWARD])
    microbatches = columns.microbatches[forwards]
    apart = int(np.searchsorted(microbatches, microbatches[0] + period))
    everything = _kinds(columns)
    for number in range(0, forwards.size - 2 * apart, apart):
        first, middle, last = forwards[[number, number + apart, number + 2 * apart]].tolist()
        body, following = columns[first:middle], columns[middle:last]
        updates = sum(each.op is Op.UPDATE for each in body)
        again = [_further(each, period, updates) for each in body] == list(map(_without_slot, following))
        if again and _kinds(body) == everything:
            return _with_slots(Program(program.rank, _from_the_first(body, period, updates), period))
    raise VerifyError(
        f"the program of rank {program.rank} never does the same for {period} microbatches as for those "
        "before; expected a schedule that goes on without end"
    )


def _kinds(instructions: Sequence[Instruction]) -> set[tuple[object, ...]]:
    """What a program does, whichever microbatch it is for.

    A value that skips stages is received far ahead, so that a stretch without its receive may repeat as well;
    so may the forwards before the first backward.
    """
    return {(each.op, each.stage, each.link, each.peer, each.bucket) for each in instructions}


def _further(instruction: Instruction, microbatches: int, updates: int) -> Instruction:
    """The same so many microbatches and updates further."""
    version = instruction.version + (updates if instruction.version >= 0 else 0)
    moved = replace(instruction, microbatch=instruction.microbatch + microbatches, version=version)
    return _without_slot(moved)


def _without_slot(instruction: Instruction) -> Instruction:
    return replace(instruction, slot=min(instruction.slot, 0))


def _from_the_first(body: Sequence[Instruction], period: int, updates: int) -> tuple[Instruction, ...]:
    """The round as early as it can name its microbatches and versions."""
    named = min(each.microbatch for each in body) // period
    versions = min(each.version for each in body if each.version >= 0) // updates
    earlier = min(named, versions)
    return tuple(
        replace(
            each,
            microbatch=each.microbatch - earlier * period,
            version=each.version - earlier * updates if each.version >= 0 else -1,
        )
        for each in body
    )


def _with_slots(program: Program) -> Program:
    window = microbatch_window(program)
    slotted = (
        replace(each, slot=each.microbatch % window) if each.slot >= 0 else each
        for each in program.instructions
    )
    return replace(program, instructions=tuple(slotted))


def steady_excerpt(
    programs: Sequence[Program], stream: Stream | None, placement: Placement
) -> Sequence[Program]:
    """Programs as they are simulated and drawn: rounds written out until the steady state is seen.

    Programs of a step are returned as they are.
    """
    if stream is None:
        return programs
    count = num_microbatches_to_lower(stream, replica_counts(placement))
    return [unroll(each, count) for each in programs]
