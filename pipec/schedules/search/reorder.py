"""Local reordering: better orders from given ones, by moving cells of the critical path.

Critical paths of a rank's span lead back from its last cell: each cell is there because the rank was busy
until then, or because it waited for the cell whose result it reads, or both. Only a change on such a path
can shorten the span, so the moves tried are those that take one of its cells past its neighbours.
"""

from collections import deque
from collections.abc import Iterator

from pipec.schedules.search.play import Play, play
from pipec.schedules.search.problem import Orders, Problem

_STEPS = (1, -1, 2, -2, 3, -3)
"""How many neighbours a cell is taken past: later ones, or earlier ones if negative."""

_TIE = 1e-9
"""Times closer than this are equal: sums of the same costs in another order."""

Score = tuple[float, ...]


def reorder(problem: Problem, orders: Orders, *, by_span: bool, plays: int) -> Orders:
    """``orders`` or better ones with the same cells, within the memory limit; at most ``plays`` are played.

    Better is a shorter span, then makespan, or the other way round; never worse than what was given.
    """
    best = play(problem, orders)
    assert best is not None
    improved = True
    while improved and plays > 0:
        improved = False
        for candidate in _moves(problem, orders, best, by_span):
            plays -= 1
            found = play(problem, candidate)
            if found and score(found, by_span) < score(best, by_span):
                orders, best, improved = candidate, found, True
                break
            if plays <= 0:
                break
    return orders


def score(timeline: Play, by_span: bool) -> Score:
    """What is to be small: the span or the makespan, the other, and when forwards and input gradients end.

    The last decides where several ranks delay the critical path in turn, and one move alone gains nothing.
    """
    span, makespan = round(max(timeline.spans), 9), round(timeline.makespan, 9)
    first, second = (span, makespan) if by_span else (makespan, span)
    return first, second, round(timeline.sum_of_ends, 6)


def _moves(problem: Problem, orders: Orders, timeline: Play, by_span: bool) -> Iterator[Orders]:
    """The orders with one cell of a critical path taken past some of its neighbours, where that fits."""
    position = {cell: (rank, at) for rank, order in enumerate(orders) for at, cell in enumerate(order)}
    critical = list(_critical_cells(problem, orders, timeline, position, by_span))
    for step in _STEPS:
        for cell in critical:
            rank, at = position[cell]
            target = at + step
            if 0 <= target < len(orders[rank]) and _keeps_pairs(problem, orders[rank], at, target):
                order = [each for each in orders[rank] if each != cell]
                order.insert(target, cell)
                if problem.fits(rank, order):
                    yield [*orders[:rank], order, *orders[rank + 1 :]]


def _keeps_pairs(problem: Problem, order: list[int], at: int, target: int) -> bool:
    """Whether a cell taken from ``at`` to ``target`` passes none of its own stage and kind or microbatch."""
    low, high = min(at, target), max(at, target)
    passed = order[low:at] + order[at + 1 : high + 1]
    m, cell = problem.num_microbatches, order[at]
    period = m * problem.num_stages
    return all(each // m != cell // m and each % period != cell % period for each in passed)


def _critical_cells(
    problem: Problem, orders: Orders, timeline: Play, position: dict[int, tuple[int, int]], by_span: bool
) -> Iterator[int]:
    """From the last cell of the longest rank back to the start, whatever a cell follows without a pause."""
    ends = [timeline.end[order[-1]] for order in orders]
    keys = timeline.spans if by_span else ends
    front = deque([orders[max(range(len(orders)), key=lambda rank: keys[rank])][-1]])
    visited = set(front)
    while front:
        cell = front.popleft()
        yield cell
        rank, at = position[cell]
        before = orders[rank][at - 1] if at else -1
        for other, ready in ((before, timeline.end), (problem.needs[cell], timeline.arrived)):
            tight = other >= 0 and ready[other] >= timeline.start[cell] - _TIE
            if tight and other not in visited:
                visited.add(other)
                front.append(other)
