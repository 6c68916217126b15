"""The order of a step whose tail has gradients.

Backwards wait for the tail, and the tail waits for forwards. So all forwards come before the backwards, or
forwards that save nothing come before the schedule, in which all forwards run again. The second order is
gradient caching (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup").
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from pipec.ir import Compute, Phase, Plan, Schedule, rank_of
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


def has_forwards_first(schedule: Schedule) -> bool:
    """Whether every rank runs all of its forwards before its other computes."""
    code = PHASE_CODE[Phase.FORWARD]
    orders = map(ComputeColumns.of, schedule.orders)
    return all((np.diff((order.phases != code).astype(np.int8)) >= 0).all() for order in orders)


def with_two_forwards(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """The schedule after forwards of ``stages`` that save nothing::

        F0 F1 B0 F2 B1 B2    ->    f0 f1 f2 F0 F1 B0 F2 B1 B2

    A rank runs the first of the microbatches that have reached one of its stages, if every forward takes one
    unit of time. Where it would idle, and the schedule begins with forwards that it could run, it runs these.
    """
    orders = []
    for rank, order in enumerate(_first_forwards(schedule, sorted(stages))):
        begun = sum(compute.phase is Phase.FORWARD for compute in order)
        later = ComputeColumns.of(schedule.orders[rank])
        left = later.taken(np.arange(begun, len(later)))
        orders.append(_joined(ComputeColumns.of(order), left))
    return replace(schedule, orders=tuple(orders))


def has_two_forwards(schedule: Schedule) -> bool:
    """Whether forwards that save nothing come before those of the schedule."""
    code = PHASE_CODE[Phase.FORWARD_ONLY]
    return any((ComputeColumns.of(order).phases == code).any() for order in schedule.orders)


def without_first_forwards(schedule: Schedule) -> Schedule:
    """The schedule without the forwards that save nothing."""
    code = PHASE_CODE[Phase.FORWARD_ONLY]
    orders = map(ComputeColumns.of, schedule.orders)
    return replace(schedule, orders=tuple(order.where(order.phases != code) for order in orders))


def ordered_for_tail(schedule: Schedule, plan: Plan) -> Schedule:
    """The schedule in the order that the tail of a plan demands."""
    if plan.forward_only_stages:
        return with_two_forwards(schedule, plan.forward_only_stages)
    waits = any(stage.tail and stage.tail.gradients for stage in plan.stages)
    return with_forwards_first(schedule) if waits else schedule


def tail_reads(index: ScheduleIndex, plan: Plan) -> tuple[Ints, Ints]:
    """The first backward of each rank of the tail's stage, with the last forward of each of these ranks that
    makes rows for the tail.
    """
    readers, producers = list[int](), list[int]()
    for stage in (each for each in plan.stages if each.tail and each.tail.gradients):
        first, last = dict[int, int](), dict[int, int]()
        makes_rows = PHASE_CODE[Phase.FORWARD_ONLY if stage.forward_only else Phase.FORWARD]
        for rank in plan.placement[stage.index]:
            own = index.computes[rank]
            of_stage = own.stages == stage.index
            is_forward = (own.phases == PHASE_CODE[Phase.FORWARD]) | (own.phases == makes_rows)
            last[rank] = index.first_tasks[rank] + int(
                np.flatnonzero(of_stage & (own.phases == makes_rows)).max()
            )
            if (backwards := np.flatnonzero(of_stage & ~is_forward)).size:
                first[rank] = index.first_tasks[rank] + int(backwards[0])
        for reader in first.values():
            readers += [reader] * len(last)
            producers += last.values()
    return np.array(readers, np.int32), np.array(producers, np.int32)


def _first_forwards(schedule: Schedule, stages: Sequence[int]) -> list[list[Compute]]:
    """The computes of each rank until its last forward that saves nothing has run."""
    placement, count = schedule.placement, schedule.num_microbatches
    orders = [list[Compute]() for _ in range(schedule.num_ranks)]
    ready = [list[tuple[int, int]]() for _ in orders]  # microbatches and places in ``stages``
    left = [0] * len(orders)
    own = [deque(_leading_forwards(order)) for order in schedule.orders]
    place_of = {stage: place for place, stage in enumerate(stages)}
    made = {stage: set[int]() for stage in range(-1, len(placement))}
    made[-1].update(range(count))
    for place, stage in enumerate(stages):
        for microbatch in range(count):
            left[rank_of(placement, stage, microbatch)] += 1
            if place == 0:
                heappush(ready[rank_of(placement, stage, microbatch)], (microbatch, place))
    while any(left):
        ended = list[Compute]()
        for rank, order in enumerate(orders):
            if ready[rank]:
                microbatch, place = heappop(ready[rank])
                left[rank] -= 1
                ended.append(Compute(Phase.FORWARD_ONLY, stages[place], microbatch))
                order.append(ended[-1])
            elif left[rank] and own[rank] and own[rank][0].microbatch in made[own[rank][0].stage - 1]:
                ended.append(own[rank].popleft())
                order.append(ended[-1])
        for each in ended:
            if each.phase is Phase.FORWARD:
                made[each.stage].add(each.microbatch)
            elif (place := place_of[each.stage] + 1) < len(stages):
                heappush(ready[rank_of(placement, stages[place], each.microbatch)], (each.microbatch, place))
    return orders


def _leading_forwards(order: Sequence[Compute]) -> Sequence[Compute]:
    """The forwards before the first other compute of a rank."""
    computes = ComputeColumns.of(order)
    others = np.flatnonzero(computes.phases != PHASE_CODE[Phase.FORWARD])
    return computes[: int(others[0]) if others.size else len(computes)]


def _joined(first: ComputeColumns, second: ComputeColumns) -> ComputeColumns:
    return ComputeColumns(np.concatenate([first.matrix, second.matrix], axis=1))
