"""Periodic programs, found in programs that were lowered for a number of microbatches.

Once the pipeline is full, a rank repeats the same instructions for the microbatches of each next mini-batch.
Where stages have replicas, it repeats them after as many mini-batches as return every stage to its first
replica. That part of its program is the period. Without the instructions whose microbatches do not exist, it
is a program for any number of microbatches; ``verify_periodic`` proves that.
"""

from collections.abc import Sequence

import numpy as np

from pipec.errors import VerifyError
from pipec.ir import Placement, Plan, Program, Schedule, Stream, replica_counts
from pipec.ir.columns import OP_CODE, InstructionColumns
from pipec.ir.periodic_program import microbatch_window, unroll
from pipec.ir.program import Op
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
    """The instructions between two forwards a period apart, after the last reader of the first version.

    The period has every instruction of the program, of any microbatch: a value that skips stages is received
    far ahead, so a part without its receive may repeat as well, and so may the forwards before the first
    backward. It names the lowest microbatches and versions that it can.
    """
    columns = program.instructions
    assert isinstance(columns, InstructionColumns)
    matrix, is_update = columns.matrix, columns.ops == OP_CODE[Op.UPDATE]
    kinds = np.unique(matrix[[0, 1, 3, 4, 6]], axis=1, return_inverse=True)[1].reshape(-1)
    forwards = np.flatnonzero(columns.ops == OP_CODE[Op.FORWARD])
    stride = int(np.searchsorted(matrix[2, forwards], matrix[2, forwards[0]] + period))
    for number in range(0, forwards.size - 2 * stride, stride):
        first, middle, last = forwards[[number, number + stride, number + 2 * stride]].tolist()
        body, following = matrix[:, first:middle].copy(), matrix[:, middle:last].copy()
        has_version, updates = body[9] >= 0, int(is_update[first:middle].sum())
        again = body.copy()
        again[2] += period
        again[9] += updates * has_version
        for each in (again, following):
            each[5] = np.minimum(each[5], 0)
        if np.array_equal(again, following) and np.unique(kinds[first:middle]).size == kinds.max() + 1:
            earlier = min(body[2].min() // period, body[9, has_version].min() // updates)
            body[2] -= earlier * period
            body[9] -= earlier * updates * has_version
            folded = Program(program.rank, InstructionColumns(body, columns.links), period)
            body[5] = np.where(body[5] >= 0, body[2] % microbatch_window(folded), -1)
            return folded
    raise VerifyError(
        f"the program of rank {program.rank} never repeats its instructions after {period} microbatches; "
        "expected a schedule that can run without end"
    )


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
