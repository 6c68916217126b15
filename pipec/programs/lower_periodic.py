"""Periodic programs, found in programs that were lowered for a number of microbatches.

Once the pipeline is full, a rank repeats the same instructions for the microbatches of each next mini-batch.
Where stages have replicas, it repeats them after as many mini-batches as return every stage to its first
replica. That part of its program is the period. Without the instructions whose microbatches do not exist, it
is a program for any number of microbatches; ``verify_periodic`` proves that.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipec.errors import VerifyError
from pipec.ir import Placement, Plan, Program, Schedule, Stream, replica_counts
from pipec.ir.columns import OP_CODE, InstructionColumns
from pipec.ir.periodic_program import microbatch_window, unroll
from pipec.ir.program import Instruction, Op
from pipec.ir.stream import window
from pipec.programs.lower import lower

_MORE = 4
"""The rounds that are lowered besides those that fill the pipeline, so that a whole one is among them."""


def lower_periodic(schedule: Schedule, plan: Plan) -> tuple[Program, ...]:
    """The periodic programs of a schedule for ``num_microbatches_to_lower`` microbatches or more."""
    assert schedule.stream is not None
    programs = lower(schedule, plan)
    period = schedule.stream.period(replica_counts(schedule.placement))
    return tuple(_periodic(program, period) for program in programs)


def num_microbatches_to_lower(stream: Stream, replicas: Sequence[int]) -> int:
    """The number of microbatches with which a schedule contains whole periods."""
    period = stream.period(replicas)
    filling = -(-replicas[0] * window(0, replicas) // period)
    return period * (2 * filling + _MORE)


def _periodic(program: Program, period: int) -> Program:
    """The instructions between two forwards a period apart, after the last reader of the first version."""
    columns = program.instructions
    assert isinstance(columns, InstructionColumns)
    forwards = np.flatnonzero(columns.ops == OP_CODE[Op.FORWARD])
    microbatches = columns.microbatches[forwards]
    stride = int(np.searchsorted(microbatches, microbatches[0] + period))
    everything = _kinds(columns)
    for number in range(0, forwards.size - 2 * stride, stride):
        first, middle, last = forwards[[number, number + stride, number + 2 * stride]].tolist()
        body, following = columns[first:middle], columns[middle:last]
        updates = sum(each.op is Op.UPDATE for each in body)
        later = (_moved(each, 1, period, updates) for each in body)
        again = [*map(_without_slot, later)] == [*map(_without_slot, following)]
        if again and _kinds(body) == everything:
            return _with_slots(Program(program.rank, _from_the_first(body, period, updates), period))
    raise VerifyError(
        f"the program of rank {program.rank} never repeats its instructions after {period} microbatches; "
        "expected a schedule that can run without end"
    )


def _kinds(instructions: Sequence[Instruction]) -> set[tuple[object, ...]]:
    """The instructions of a program without their microbatches.

    They show whether a period is complete: a value that skips stages is received far ahead, so a part without
    its receive may repeat as well, and so may the forwards before the first backward.
    """
    return {(each.op, each.stage, each.link, each.peer, each.bucket) for each in instructions}


def _moved(instruction: Instruction, periods: int, period: int, updates: int) -> Instruction:
    """The instruction of a later period, with a later version."""
    version = instruction.version + (periods * updates if instruction.version >= 0 else 0)
    return replace(instruction, microbatch=instruction.microbatch + periods * period, version=version)


def _without_slot(instruction: Instruction) -> Instruction:
    return replace(instruction, slot=min(instruction.slot, 0))


def _from_the_first(body: Sequence[Instruction], period: int, updates: int) -> tuple[Instruction, ...]:
    """The round with the lowest microbatches and versions that it can name."""
    named = min(each.microbatch for each in body) // period
    versions = min(each.version for each in body if each.version >= 0) // updates
    return tuple(_moved(each, -min(named, versions), period, updates) for each in body)


def _with_slots(program: Program) -> Program:
    window, own = microbatch_window(program), program.instructions
    slotted = [replace(each, slot=each.microbatch % window) if each.slot >= 0 else each for each in own]
    return replace(program, instructions=tuple(slotted))


def steady_excerpt(
    programs: Sequence[Program], stream: Stream | None, placement: Placement
) -> Sequence[Program]:
    """Programs to simulate and draw: periodic ones unrolled until they include the steady state.

    Programs of a synchronous step are returned unchanged.
    """
    if stream is None:
        return programs
    count = num_microbatches_to_lower(stream, replica_counts(placement))
    return [unroll(each, count) for each in programs]
