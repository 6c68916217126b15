"""Local search: improves orders by moving tasks of the critical path.

Critical paths of a rank's span lead back from its last task. Each task on them starts when the rank has ended
the previous task, or when the result that it reads arrives, or both. Only a change on such a path can shorten
the span, so a move takes one of its tasks past its neighbours.
"""

from collections import deque
from collections.abc import Iterator

from pipec.schedules.search.ordering_problem import OrderingProblem, OrderTiming, TaskOrders, time_orders

_STEPS = (1, -1, 2, -2, 3, -3)
"""The number of neighbours that a move passes: later ones, or earlier ones if negative."""

_TIE = 1e-9
"""Times closer than this are equal: sums of the same costs in another order."""

Score = tuple[float, ...]


def reorder(problem: OrderingProblem, orders: TaskOrders, *, by_span: bool, max_timings: int) -> TaskOrders:
    """The best orders that moves find from ``orders`` within the memory limits, with at most ``max_timings``.

    ``score`` compares orders: by span first, or by makespan first.
    """
    best = time_orders(problem, orders)
    assert best is not None
    improved = True
    while improved and max_timings > 0:
        improved = False
        for candidate in _moves(problem, orders, best, by_span):
            max_timings -= 1
            timing = time_orders(problem, candidate)
            if timing and score(timing, by_span) < score(best, by_span):
                orders, best, improved = candidate, timing, True
                break
            if max_timings <= 0:
                break
    return orders


def score(timing: OrderTiming, by_span: bool) -> Score:
    """The values to minimize: first span or makespan, then the other, then the sum of task ends.

    The sum of the ends of forwards and input gradients decides where several ranks delay the critical path
    one after the other, so that no single move shortens it.
    """
    span, makespan = round(max(timing.spans), 9), round(timing.makespan, 9)
    first, second = (span, makespan) if by_span else (makespan, span)
    return first, second, round(timing.sum_of_ends, 6)


def _moves(
    problem: OrderingProblem, orders: TaskOrders, timing: OrderTiming, by_span: bool
) -> Iterator[TaskOrders]:
    """Orders within the memory limits with one task of a critical path moved past some neighbours."""
    position = {task: (rank, at) for rank, order in enumerate(orders) for at, task in enumerate(order)}
    critical = list(_critical_tasks(problem, orders, timing, position, by_span))
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
    """Whether a move from ``at`` to ``target`` passes no task of the same stage and phase or microbatch."""
    low, high = min(at, target), max(at, target)
    passed = order[low:at] + order[at + 1 : high + 1]
    m, task = problem.num_microbatches, order[at]
    period = m * problem.num_stages
    return all(each // m != task // m and each % period != task % period for each in passed)


def _critical_tasks(
    problem: OrderingProblem,
    orders: TaskOrders,
    timing: OrderTiming,
    position: dict[int, tuple[int, int]],
    by_span: bool,
) -> Iterator[int]:
    """The last task of the longest rank, and back to the start each task that another follows at once."""
    ends = [timing.end[order[-1]] for order in orders]
    keys = timing.spans if by_span else ends
    front = deque([orders[max(range(len(orders)), key=lambda rank: keys[rank])][-1]])
    visited = set(front)
    while front:
        task = front.popleft()
        yield task
        rank, at = position[task]
        before = orders[rank][at - 1] if at else -1
        for other, ready in ((before, timing.end), (problem.producer[task], timing.arrived)):
            is_critical = other >= 0 and ready[other] >= timing.start[task] - _TIE
            if is_critical and other not in visited:
                visited.add(other)
                front.append(other)
