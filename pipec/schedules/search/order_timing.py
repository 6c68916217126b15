"""Times given orders, and puts weight gradients into pauses where the orders lack them.

No task waits for a weight gradient, so it can wait for a pause, or until its memory is needed. A search only
has to order the other tasks. ``greedy`` chooses orders while it times them; here orders are given.
``programs.task_times`` times an order of any size, for all ranks at a time; this module times thousands of
small orders a second, and gives up early on a bad one.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from pipec.schedules.search.ordering_problem import OrderingProblem, TaskOrders


@dataclass(frozen=True, slots=True)
class OrderTiming:
    """When each task starts and ends. ``orders`` have all tasks, weight gradients included.

    ``arrived[task]`` is when the result of a task reaches its reader. ``sum_of_ends`` is the sum of the ends
    of forwards and input gradients.
    """

    orders: TaskOrders
    start: Sequence[float]
    end: Sequence[float]
    arrived: Sequence[float]
    makespan: float
    sum_of_ends: float

    @property
    def spans(self) -> list[float]:
        """The time of each rank from the start of its first task to the end of its last."""
        return [self.end[order[-1]] - self.start[order[0]] for order in self.orders]


def time_orders(
    problem: OrderingProblem, orders: TaskOrders, longest: float = math.inf
) -> OrderTiming | None:
    """The times of ``orders``, equal to the simulated times of the lowered programs.

    A rank whose order has no weight gradients runs each of them in a pause that is long enough, or where
    another task needs its memory. The result is None if tasks wait for each other, if a rank would exceed its
    memory limit, or if the makespan would exceed ``longest``. Takes time linear in the number of tasks.
    """
    state = _TimingState(problem, orders, longest)
    while state.runnable:
        if not state.run(state.runnable.pop()):
            return None
    if state.waiting:
        return None
    makespan = max(map(add, state.idle, problem.busy_times))
    sum_of_ends = sum(state.end[: problem.first_weight_gradient])
    return OrderTiming(state.done, state.start, state.end, state.arrived, makespan, sum_of_ends)


class _TimingState:
    """The progress of each rank: its position, memory, idle time and weight gradients that it has put off.

    ``waiting`` maps the task that a rank waits for to the rank; ``_free`` has when each channel is free.
    """

    def __init__(self, problem: OrderingProblem, orders: TaskOrders, longest: float) -> None:
        num_tasks = len(problem.producer)
        self.done: TaskOrders = [[] for _ in orders]
        self.start, self.end, self.arrived = [0.0] * num_tasks, [0.0] * num_tasks, [-1.0] * num_tasks
        self.idle = [0.0] * len(orders)
        self.runnable, self.waiting = list(range(len(orders))), dict[int, int]()
        self._problem, self._orders, self._longest = problem, orders, longest
        self._free = [0.0] * problem.num_channels
        self._states = [(0, 0.0, 0.0)] * len(orders)
        self._deferred = [deque[int]() for _ in orders]
        self._defers = [bool(order) and order[-1] < problem.first_weight_gradient for order in orders]

    def run(self, rank: int) -> bool:
        """Run a rank to its end, or to a task whose input has not arrived; False if a limit is exceeded."""
        problem, order = self._problem, self._orders[rank]
        deferred, defers = self._deferred[rank], self._defers[rank]
        producer, message_times, channels = problem.producer, problem.message_times, problem.channels
        seconds, growth, limit = problem.seconds, problem.memory_growth, problem.memory_limits[rank]
        first_input_gradient = problem.first_input_gradient
        start, end, arrived, free = self.start, self.end, self.arrived, self._free
        done, waiting = self.done[rank], self.waiting
        first, now, held = self._states[rank]
        for number in range(first, len(order)):
            task = order[number]
            source, arrival = producer[task], 0.0
            if source >= 0:
                arrival = arrived[source]
                if arrival < 0:
                    waiting[source] = rank
                    self._states[rank] = number, now, held
                    return True
            task_growth = growth[task]
            while deferred and (held + task_growth > limit or now + seconds[deferred[0]] <= arrival):
                weight = deferred.popleft()
                done.append(weight)
                start[weight] = now
                end[weight] = now = now + seconds[weight]
                held += growth[weight]
            held += task_growth
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
                arrived[task] = free[channel] = max(now, free[channel]) + message_times[task]
            else:
                arrived[task] = now + message_times[task]
            done.append(task)
            if defers and task >= first_input_gradient:
                deferred.append(task + first_input_gradient)
            if task in waiting:
                self.runnable.append(waiting.pop(task))
        for weight in deferred:
            done.append(weight)
            start[weight] = now
            end[weight] = now = now + seconds[weight]
        return True
