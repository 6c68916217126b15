"""Local reordering: better orders from given ones, by moving cells of the critical path.

The critical path of a rank's span leads back from its last cell: each cell is there because the rank was busy
until then, or because it waited for the cell whose result it reads. Only a change on that path can shorten the
span, so the moves tried are those that take a cell of the path past its neighbours.
"""

from collections.abc import Iterator

from pipec.schedules.search_problem import Orders, Play, Problem, play

_REACH = 6
"""How many neighbours a cell is taken past at most."""

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
    """What is to be small: the span or the makespan, then the other, then the spans of all ranks together."""
    first, second = (timeline.span, timeline.makespan) if by_span else (timeline.makespan, timeline.span)
    return round(first, 9), round(second, 9), round(sum(timeline.spans), 9)


def _moves(problem: Problem, orders: Orders, timeline: Play, by_span: bool) -> Iterator[Orders]:
    """The orders with one cell of the critical path taken past up to ``_REACH`` neighbours, where that fits."""
    position = {cell: (rank, at) for rank, order in enumerate(orders) for at, cell in enumerate(order)}
    for cell in _critical_path(problem, orders, timeline, position, by_span):
        rank, at = position[cell]
        for target in _targets(at, len(orders[rank])):
            order = [each for each in orders[rank] if each != cell]
            order.insert(target, cell)
            if _keeps_pairs(problem, orders[rank], at, target) and problem.fits(order):
                yield [*orders[:rank], order, *orders[rank + 1 :]]


def _targets(at: int, length: int) -> Iterator[int]:
    for step in range(1, _REACH + 1):
        if at + step < length:
            yield at + step
        if at - step >= 0:
            yield at - step


def _keeps_pairs(problem: Problem, order: list[int], at: int, target: int) -> bool:
    """Whether a cell taken from ``at`` to ``target`` passes none of its own stage and kind or microbatch."""
    low, high = min(at, target), max(at, target)
    passed = order[low:at] + order[at + 1 : high + 1]
    m, cell = problem.num_microbatches, order[at]
    period = m * problem.num_stages
    return all(each // m != cell // m and each % period != cell % period for each in passed)


def _critical_path(
    problem: Problem, orders: Orders, timeline: Play, position: dict[int, tuple[int, int]], by_span: bool
) -> Iterator[int]:
    """From the last cell of the longest rank back to a start, cells that follow without a pause."""
    ends = [timeline.end[order[-1]] for order in orders]
    keys = timeline.spans if by_span else ends
    cell = orders[max(range(len(orders)), key=lambda rank: keys[rank])][-1]
    while True:
        yield cell
        rank, at = position[cell]
        before = orders[rank][at - 1] if at else -1
        needed = problem.needs[cell]
        if before >= 0 and timeline.end[before] >= timeline.start[cell]:
            cell = before
        elif needed >= 0:
            cell = needed
        else:
            return
