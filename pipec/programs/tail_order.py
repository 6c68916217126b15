"""The order of a step with a tail: all forwards of a stage, the tail, and then its backwards."""

from dataclasses import replace

import numpy as np

from pipec.ir import Phase, Schedule
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


def tail_reads(index: ScheduleIndex, stage: int) -> tuple[Ints, Ints]:
    """The first backward of each rank of a stage with a tail, with the last forward of each of them."""
    readers, producers = list[int](), list[int]()
    for rank in index.schedule.placement[stage] if stage >= 0 else ():
        own = index.computes[rank]
        backwards = np.flatnonzero((own.stages == stage) & (own.phases != PHASE_CODE[Phase.FORWARD]))
        for other in index.schedule.placement[stage] if backwards.size else ():
            theirs = index.computes[other]
            forwards = (theirs.stages == stage) & (theirs.phases == PHASE_CODE[Phase.FORWARD])
            readers.append(index.first_tasks[rank] + int(backwards[0]))
            producers.append(index.first_tasks[other] + int(np.flatnonzero(forwards).max()))
    return np.array(readers, np.int32), np.array(producers, np.int32)
