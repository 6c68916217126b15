"""The order of a step whose tail has gradients.

Backwards wait for the tail, and the tail waits for forwards. So all forwards come before the backwards.
"""

from dataclasses import replace

import numpy as np

from pipec.ir import Phase, Plan, Schedule
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


def tail_reads(index: ScheduleIndex, plan: Plan) -> tuple[Ints, Ints]:
    """The first backward of each rank of the tail's stage, with the last forward of each of these ranks."""
    readers, producers = list[int](), list[int]()
    for stage in (each for each in plan.stages if each.tail and each.tail.gradients):
        first, last = dict[int, int](), dict[int, int]()
        for rank in plan.placement[stage.index]:
            own = index.computes[rank]
            of_stage = own.stages == stage.index
            is_forward = own.phases == PHASE_CODE[Phase.FORWARD]
            last[rank] = index.first_tasks[rank] + int(np.flatnonzero(of_stage & is_forward).max())
            if (backwards := np.flatnonzero(of_stage & ~is_forward)).size:
                first[rank] = index.first_tasks[rank] + int(backwards[0])
        for reader in first.values():
            readers += [reader] * len(last)
            producers += last.values()
    return np.array(readers, np.int32), np.array(producers, np.int32)
