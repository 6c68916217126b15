"""The order of a step whose tail has gradients, or whose loss the script computes.

Backwards wait for the tail or the script, and these wait for forwards. So all forwards come before the
backwards.
"""

from dataclasses import replace

import numpy as np

from pipec.ir import Mode, Phase, Plan, Schedule
from pipec.ir.columns import PHASE_CODE, ComputeColumns, Ints
from pipec.programs.schedule_index import ScheduleIndex


def with_forwards_first(schedule: Schedule) -> Schedule:
    """The schedule with the forwards of each rank before its other computes, both in their order::

    F0 F1 B0 F2 B1 B2    ->    F0 F1 F2 B0 B1 B2
    """
    orders = []
    for order in map(ComputeColumns.of, schedule.orders):
        is_forward = order.phases == PHASE_CODE[Phase.FORWARD]
        numbers = np.concatenate([np.flatnonzero(is_forward), np.flatnonzero(~is_forward)])
        orders.append(order.taken(numbers))
    return replace(schedule, orders=tuple(orders))


def num_forwards(index: ScheduleIndex, rank: int) -> int:
    """How many forwards a rank has, which come first; one in segments counts once for each of them."""
    return int(np.count_nonzero(index.computes[rank].phases == PHASE_CODE[Phase.FORWARD]))


def loss_reads(index: ScheduleIndex, plan: Plan) -> tuple[Ints, Ints]:
    """The backwards that wait for the loss or for the tail, each with the last forwards that it waits for.

    A loss that the script computes needs the forwards of all ranks, and a tail those of its stage's ranks.
    """
    readers, producers = list[int](), list[int]()
    if plan.mode is Mode.OUTPUTS:
        firsts = index.first_tasks
        last = [first + num_forwards(index, rank) - 1 for rank, first in enumerate(firsts[:-1])]
        for reader, end in zip(last, firsts[1:], strict=True):
            if reader + 1 < end:
                readers += [reader + 1] * len(last)
                producers += last
    for stage in (each for each in plan.stages if each.tail and each.tail.gradients):
        first, last_of = dict[int, int](), dict[int, int]()
        for rank in plan.placement[stage.index]:
            own = index.computes[rank]
            of_stage = own.stages == stage.index
            is_forward = own.phases == PHASE_CODE[Phase.FORWARD]
            last_of[rank] = index.first_tasks[rank] + int(np.flatnonzero(of_stage & is_forward).max())
            if (backwards := np.flatnonzero(of_stage & ~is_forward)).size:
                first[rank] = index.first_tasks[rank] + int(backwards[0])
        for reader in first.values():
            readers += [reader] * len(last_of)
            producers += last_of.values()
    return np.array(readers, np.int32), np.array(producers, np.int32)
