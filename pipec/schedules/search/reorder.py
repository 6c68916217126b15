"""Local reordering: better orders from given ones, by moving tasks of the critical path.

Critical paths of a rank's span lead back from its last task: each task is there because the rank was busy
until then, or because it waited for the task whose result it reads, or both. Only a change on such a path
can shorten the span, so the moves tried are those that take one of its tasks past its neighbours.
"""

from collections import deque
from collections.abc import Iterator

from pipec.schedules.search.order_timing import OrderTiming, time_orders
from pipec.schedules.search.ordering_problem import OrderingProblem, TaskOrders

_STEPS = (1, -1, 2, -2, 3, -3)
"""How many neighbours a task is taken past: later ones, or earlier ones if negative."""

_TIE = 1e-9
"""Times closer than this are equal: sums of the same costs in another order."""

Score = tuple[float, ...]


def reorder(problem: OrderingProblem, orders: TaskOrders, *, by_span: bool, max_timings: int) -> TaskOrders:
    """``orders``, or better ones of the same tasks within the memory limits, after at most ``max_timings``.

    Better orders have a shorter span or, if that is the same, a shorter makespan; or the other way round.
    """
    best = time_orders(problem, orders)
    assert best is not None
    improved = True
    while improved and max_timings > 0:
        improved = False
        for candidate in _moves(problem, orders, best, by_span):
            max_timings -= 1
            found = time_orders(problem, candidate)
            if found and score(found, by_span) < score(best, by_span):
                orders, best, improved = candidate, found, True
                break
            if max_timings <= 0:
                break
    return orders


def score(timeline: OrderTiming, by_span: bool) -> Score:
    """What is to be small: first the span or the makespan, then the other, then the ends of tasks.

    Those of forwards and input gradients decide where several ranks delay the critical path in turn, so that
    one move alone gains nothing.
    """
    span, makespan = round(max(timeline.spans), 9), round(timeline.makespan, 9)
    first, second = (span, makespan) if by_span else (makespan, span)
    return first, second, round(timeline.sum_of_ends, 6)


def _moves(
    problem: OrderingProblem, orders: TaskOrders, timeline: OrderTiming, by_span: bool
) -> Iterator[TaskOrders]:
    """The orders with one task of a critical path taken past some of its neighbours, where that fits."""
    position = {task: (rank, at) for rank, order in enumerate(orders) for at, task in enumerate(order)}
    critical = list(_critical_cells(problem, orders, timeline, position, by_span))
    for step in _STEPS:
        for task in critical:
            rank, at = position[task]
            target = at + step
            if 0 <= target < len(orders[rank]) and _keeps_pairs(problem, orders[rank], at, target):
                order = [each for each in orders[rank] if each != task]
                order.insert(target, task)
                if problem.fits(rank, order):
                    yield [*orders[:rank], order, *orders[rank + 1 :]]


def _keeps_pairs(problem: OrderingProblem, order: list[int], at: int, target: int) -> bool:
    """Whether a task taken from ``at`` to ``target`` passes none of its own stage and kind or microbatch."""
    low, high = min(at, target), max(at, target)
    passed = order[low:at] + order[at + 1 : high + 1]
    m, task = problem.num_microbatches, order[at]
    period = m * problem.num_stages
    return all(each // m != task // m and each % period != task % period for each in passed)


def _critical_cells(
    problem: OrderingProblem,
    orders: TaskOrders,
    timeline: OrderTiming,
    position: dict[int, tuple[int, int]],
    by_span: bool,
) -> Iterator[int]:
    """From the last task of the longest rank back to the start, whatever a task follows without a pause."""
    ends = [timeline.end[order[-1]] for order in orders]
    keys = timeline.spans if by_span else ends
    front = deque([orders[max(range(len(orders)), key=lambda rank: keys[rank])][-1]])
    visited = set(front)
    while front:
        task = front.popleft()
        yield task
        rank, at = position[task]
        before = orders[rank][at - 1] if at else -1
        for other, ready in ((before, timeline.end), (problem.producer[task], timeline.arrived)):
            tight = other >= 0 and ready[other] >= timeline.start[task] - _TIE
            if tight and other not in visited:
                visited.add(other)
                front.append(other)
