"""Playing: the timeline of given orders, with weight gradients put into pauses where orders lack them.

Nothing waits for a weight gradient, so it need not run before there is a pause for it or its memory is
needed; the order of the other cells is what there is to search. ``greedy`` chooses an order as it goes; what
is played here has one. ``programs.timing`` runs one order of any size, a step of all ranks at a time; this
runs thousands of small ones a second, and gives up early on one that leads nowhere.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from pipec.schedules.search.problem import Orders, Problem


@dataclass(frozen=True, slots=True)
class Play:
    """When each cell starts and ends; ``orders`` have all of them.

    ``arrived`` says when the result of a cell is where it is read. ``sum_of_ends`` is over forwards and input
    gradients.
    """

    orders: Orders
    start: Sequence[float]
    end: Sequence[float]
    arrived: Sequence[float]
    makespan: float
    sum_of_ends: float

    @property
    def spans(self) -> list[float]:
        """How long each rank takes from the start of its first cell to the end of its last."""
        return [self.end[order[-1]] - self.start[order[0]] for order in self.orders]


def play(problem: Problem, orders: Orders, longest: float = math.inf) -> Play | None:
    """The timeline of ``orders``, which is that of the simulator for the lowered programs.

    A rank whose order has no weight gradients runs each of them where it would pause for as long, or where
    another cell needs its memory. The result is None if cells wait for each other, a rank would go beyond its
    limit, or the makespan would be above ``longest``. Linear in the number of cells.
    """
    playing = _Playing(problem, orders, longest)
    while playing.runnable:
        if not playing.run(playing.runnable.pop()):
            return None
    if playing.waiting:
        return None
    makespan = max(map(add, playing.idle, problem.work))
    sum_of_ends = sum(playing.end[: problem.first_weight])
    return Play(playing.done, playing.start, playing.end, playing.arrived, makespan, sum_of_ends)


class _Playing:
    """How far each rank has come, what it holds, how long it paused and which weight gradients it owes.

    ``waiting`` has the ranks by the cell they wait for, ``free`` says from when on each channel is free.
    """

    def __init__(self, problem: Problem, orders: Orders, longest: float) -> None:
        num_cells = len(problem.needs)
        self.done: Orders = [[] for _ in orders]
        self.start, self.end, self.arrived = [0.0] * num_cells, [0.0] * num_cells, [-1.0] * num_cells
        self.idle = [0.0] * len(orders)
        self.runnable, self.waiting = list(range(len(orders))), dict[int, int]()
        self._problem, self._orders, self._longest = problem, orders, longest
        self._free = [0.0] * problem.num_channels
        self._states = [(0, 0.0, 0.0)] * len(orders)
        self._owed = [deque[int]() for _ in orders]
        self._owes = [bool(order) and order[-1] < problem.first_weight for order in orders]

    def run(self, rank: int) -> bool:
        """Go on to the end of a rank, or to a cell whose input is not known; False if nothing comes of it."""
        problem, order, owed, owes = self._problem, self._orders[rank], self._owed[rank], self._owes[rank]
        needs, seconds, lags, channels = problem.needs, problem.seconds, problem.lags, problem.channels
        holds, limit, first_input = problem.holds, problem.limits[rank], problem.first_input
        start, end, arrived, free = self.start, self.end, self.arrived, self._free
        done, waiting = self.done[rank], self.waiting
        first, now, held = self._states[rank]
        for number in range(first, len(order)):
            cell = order[number]
            needed, arrival = needs[cell], 0.0
            if needed >= 0:
                arrival = arrived[needed]
                if arrival < 0:
                    waiting[needed] = rank
                    self._states[rank] = number, now, held
                    return True
            grows = holds[cell]
            while owed and (held + grows > limit or now + seconds[owed[0]] <= arrival):
                weight = owed.popleft()
                done.append(weight)
                start[weight] = now
                end[weight] = now = now + seconds[weight]
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
            if free and channels[cell] >= 0:
                channel = channels[cell]
                arrived[cell] = free[channel] = max(now, free[channel]) + lags[cell]
            else:
                arrived[cell] = now + lags[cell]
            done.append(cell)
            if owes and cell >= first_input:
                owed.append(cell + first_input)
            if cell in waiting:
                self.runnable.append(waiting.pop(cell))
        for weight in owed:
            done.append(weight)
            start[weight] = now
            end[weight] = now = now + seconds[weight]
        return True
