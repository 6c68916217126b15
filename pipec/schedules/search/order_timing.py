"""Playing: the timeline of given orders, with weight gradients put into pauses where orders lack them.

Nothing waits for a weight gradient, so it need not run before there is a pause for it or its memory is
needed; the order of the other tasks is what there is to search. ``greedy`` chooses an order as it goes; here
orders are given. ``programs.task_times`` times one order of any size, a step of all ranks at a time; this
times thousands of small ones a second, and gives up early on a bad one.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from pipec.schedules.search.ordering_problem import OrderingProblem, TaskOrders


@dataclass(frozen=True, slots=True)
class OrderTiming:
    """When each task starts and ends; ``orders`` have all of them.

    ``arrived`` says when the result of a task is where it is read. ``sum_of_ends`` is over forwards and input
    gradients.
    """

    orders: TaskOrders
    start: Sequence[float]
    end: Sequence[float]
    arrived: Sequence[float]
    makespan: float
    sum_of_ends: float

    @property
    def spans(self) -> list[float]:
        """How long each rank takes from the start of its first task to the end of its last."""
        return [self.end[order[-1]] - self.start[order[0]] for order in self.orders]


def time_orders(
    problem: OrderingProblem, orders: TaskOrders, longest: float = math.inf
) -> OrderTiming | None:
    """The timeline of ``orders``, which is that of the simulator for the lowered programs.

    A rank whose order has no weight gradients runs each of them where it would pause for as long, or where
    another task needs its memory. The result is None if tasks wait for each other, a rank would go beyond its
    limit, or the makespan would be above ``longest``. Linear in the number of tasks.
    """
    playing = _Playing(problem, orders, longest)
    while playing.runnable:
        if not playing.run(playing.runnable.pop()):
            return None
    if playing.waiting:
        return None
    makespan = max(map(add, playing.idle, problem.busy_times))
    sum_of_ends = sum(playing.end[: problem.first_weight_gradient])
    return OrderTiming(playing.done, playing.start, playing.end, playing.arrived, makespan, sum_of_ends)


class _Playing:
    """How far each rank has come, what it holds, how long it paused and which weight gradients it owes.

    ``waiting`` has the ranks by the task they wait for, ``free`` says from when on each channel is free.
    """

    def __init__(self, problem: OrderingProblem, orders: TaskOrders, longest: float) -> None:
        num_cells = len(problem.producer)
        self.done: TaskOrders = [[] for _ in orders]
        self.start, self.end, self.arrived = [0.0] * num_cells, [0.0] * num_cells, [-1.0] * num_cells
        self.idle = [0.0] * len(orders)
        self.runnable, self.waiting = list(range(len(orders))), dict[int, int]()
        self._problem, self._orders, self._longest = problem, orders, longest
        self._free = [0.0] * problem.num_channels
        self._states = [(0, 0.0, 0.0)] * len(orders)
        self._owed = [deque[int]() for _ in orders]
        self._owes = [bool(order) and order[-1] < problem.first_weight_gradient for order in orders]

    def run(self, rank: int) -> bool:
        """Go on to the end of a rank, or to a task whose input is not known; False if nothing comes of it."""
        problem, order, owed, owes = self._problem, self._orders[rank], self._owed[rank], self._owes[rank]
        needs, seconds, lags, channels = (
            problem.producer,
            problem.seconds,
            problem.message_times,
            problem.channels,
        )
        holds, limit, first_input_gradient = (
            problem.memory_growth,
            problem.memory_limits[rank],
            problem.first_input_gradient,
        )
        start, end, arrived, free = self.start, self.end, self.arrived, self._free
        done, waiting = self.done[rank], self.waiting
        first, now, held = self._states[rank]
        for number in range(first, len(order)):
            task = order[number]
            needed, arrival = needs[task], 0.0
            if needed >= 0:
                arrival = arrived[needed]
                if arrival < 0:
                    waiting[needed] = rank
                    self._states[rank] = number, now, held
                    return True
            grows = holds[task]
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
                if self.idle[rank] + problem.busy_times[rank] > self._longest:
                    return False
            if held > limit:
                return False
            start[task] = now
            end[task] = now = now + seconds[task]
            if free and channels[task] >= 0:
                channel = channels[task]
                arrived[task] = free[channel] = max(now, free[channel]) + lags[task]
            else:
                arrived[task] = now + lags[task]
            done.append(task)
            if owes and task >= first_input_gradient:
                owed.append(task + first_input_gradient)
            if task in waiting:
                self.runnable.append(waiting.pop(task))
        for weight in owed:
            done.append(weight)
            start[weight] = now
            end[weight] = now = now + seconds[weight]
        return True
