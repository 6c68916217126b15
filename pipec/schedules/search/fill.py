"""Filling: the timeline of forwards and input gradients in a given order, weight gradients in the pauses.

Nothing waits for a weight gradient, so it need not run before there is a pause for it or its memory is
needed; the order of the other cells is what there is to search.
"""

import math
from collections import deque
from dataclasses import dataclass
from operator import add

from pipec.schedules.search.problem import Orders, Problem


@dataclass(frozen=True, slots=True)
class Filled:
    """Orders with their weight gradients. The start and the mean end are of all the other cells."""

    orders: Orders
    start: list[float]
    makespan: float
    mean_end: float


def fill(problem: Problem, kept: Orders, longest: float = math.inf) -> Filled | None:
    """The timeline of ``kept``, which has every cell but the weight gradients.

    A weight gradient runs where its rank would pause for as long, or where another cell needs its memory.
    None if cells wait for each other, there is no memory for one, or the makespan would be above
    ``longest``. Linear in the number of cells, and less where that is seen early.
    """
    filling = _Filling(problem, kept, longest)
    while filling.runnable:
        if not filling.run(filling.runnable.pop()):
            return None
    if filling.waiting:
        return None
    makespan = max(map(add, filling.idle, problem.work))
    return Filled(filling.orders, filling.start, makespan, sum(filling.end) / len(filling.end))


class _Filling:
    """The ranks as they are filled: how far each has come, what it holds, which weight gradients it owes.

    ``idle`` is how long each has paused; ``waiting`` has the ranks by the cell they wait for.
    """

    def __init__(self, problem: Problem, kept: Orders, longest: float) -> None:
        ranks = range(len(kept))
        self.orders: Orders = [[] for _ in ranks]
        self.start, self.end = [0.0] * problem.first_weight, [-1.0] * problem.first_weight
        self.idle = [0.0 for _ in ranks]
        self.runnable, self.waiting = list(ranks), dict[int, int]()
        self._problem, self._kept, self._longest = problem, kept, longest
        self._states = [(0, 0.0, 0.0) for _ in ranks]
        self._weights = [deque[int]() for _ in ranks]

    def run(self, rank: int) -> bool:
        """Go on to the end of a rank, or to a cell whose input is not known; False if nothing comes of it."""
        problem, kept, start, end = self._problem, self._kept[rank], self.start, self.end
        needs, seconds, lags, holds = problem.needs, problem.seconds, problem.lags, problem.holds
        limit, first_input = problem.limit, problem.first_input
        order, weights, waiting = self.orders[rank], self._weights[rank], self.waiting
        first, now, held = self._states[rank]
        for number in range(first, len(kept)):
            cell = kept[number]
            needed, arrival = needs[cell], 0.0
            if needed >= 0:
                if end[needed] < 0:
                    waiting[needed] = rank
                    self._states[rank] = number, now, held
                    return True
                arrival = end[needed] + lags[cell]
            grows = holds[cell]
            while weights and (held + grows > limit or now + seconds[weights[0]] <= arrival):
                weight = weights.popleft()
                order.append(weight)
                now += seconds[weight]
                held += holds[weight]
            held += grows
            if arrival > now:
                self.idle[rank] += arrival - now
                now = arrival
                if self.idle[rank] + problem.work[rank] > self._longest:
                    return False
            if held > limit:
                return False
            start[cell] = now
            end[cell] = now = now + seconds[cell]
            order.append(cell)
            if cell >= first_input:
                weights.append(cell + first_input)
            if cell in waiting:
                self.runnable.append(waiting.pop(cell))
        order.extend(weights)
        return True
