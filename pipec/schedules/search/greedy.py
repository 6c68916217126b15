"""Greedy schedules: whenever a rank is free it chooses its next task, and no choice is ever undone.

``list_scheduling`` advances the time and lets each rank choose. Ranks here follow a ``GreedyPolicy`` under a
memory limit; the ranks of ``v_half_min`` follow a pattern.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipec.ir import stages_on
from pipec.schedules.search.ordering_problem import OrderingProblem, TaskOrders

_NEVER = math.inf


class ChoosingRank(Protocol):
    """A rank that chooses its tasks one by one."""

    order: list[int]
    busy_until: float

    def choose(self, now: float, arrived: Sequence[float]) -> tuple[int, float]:
        """The task to run now, or -1 and the time at which the next is known to arrive.

        ``arrived[task]`` is when the input of a forward or input gradient arrives: infinity if not known yet.
        """

    def run(self, task: int, now: float) -> None:
        """Append a task to the order; it ends at ``busy_until``."""


def list_scheduling(problem: OrderingProblem, ranks: Sequence[ChoosingRank]) -> TaskOrders | None:
    """The orders that ``ranks`` choose; None if they stop before every task has run.

    Takes time n log n in the number of tasks.
    """
    consumers, ranks_of = problem.consumer, problem.ranks
    message_times, channels = problem.message_times, problem.channels
    arrived = [_NEVER] * len(problem.producer)
    arrived[: problem.num_microbatches] = [0.0] * problem.num_microbatches
    free = [0.0] * problem.num_channels
    events = [(0.0, rank) for rank in range(len(ranks))]
    while events:
        now, number = heapq.heappop(events)
        rank = ranks[number]
        if now < rank.busy_until:
            continue
        task, wake = rank.choose(now, arrived)
        if task < 0:
            if wake < _NEVER:
                heapq.heappush(events, (wake, number))
            continue
        rank.run(task, now)
        end = rank.busy_until
        heapq.heappush(events, (end, number))
        consumer, channel = consumers[task], channels[task]
        if consumer < 0:
            continue
        sent = end if channel < 0 else max(end, free[channel])
        arrived[consumer] = arrives = sent + message_times[task]
        if channel >= 0:
            free[channel] = arrives
        if ranks[ranks_of[consumer]].busy_until <= now:
            heapq.heappush(events, (arrives, ranks_of[consumer]))
    orders = [rank.order for rank in ranks]
    return orders if sum(map(len, orders)) == len(problem.producer) else None


@dataclass(frozen=True, slots=True)
class GreedyPolicy:
    """How a rank chooses among tasks.

    * ``fill``: a weight gradient runs in a pause of at least this fraction of its own time. It always runs
      if another task lacks memory.
    * ``patience``: a rank that has run no input gradient yet delays a forward if an input gradient arrives
      within this fraction of the forward's time.
    * ``forward_first``: forwards run before input gradients that could run as well.
    * ``max_in_flight[stage]``: the most microbatches between forward and input gradient.
    """

    fill: float
    patience: float
    forward_first: bool
    max_in_flight: tuple[int, ...]


def greedy_orders(problem: OrderingProblem, policy: GreedyPolicy) -> TaskOrders | None:
    """The orders that ``policy`` leads to; None if ranks stop for lack of memory."""
    return list_scheduling(problem, [_Rank(problem, policy, rank) for rank in range(problem.num_ranks)])


class _Queue:
    """The forwards, or the input gradients, of one stage: tasks ``first`` to ``end``, and the next to run.

    ``required_memory`` must be free when a task starts. A forward leaves memory for one microbatch in every
    later stage of its rank. Otherwise a V would fill up with microbatches that none of its ranks can finish.
    """

    def __init__(self, first: int, num_microbatches: int, required_memory: float) -> None:
        self.next, self.end = first, first + num_microbatches
        self.first, self.required_memory = first, required_memory


class _Rank:
    """A rank that chooses by a policy: the next tasks of each of its stages, and its memory in use."""

    def __init__(self, problem: OrderingProblem, policy: GreedyPolicy, rank: int) -> None:
        self.order: list[int] = []
        self.busy_until = 0.0
        self._problem, self._policy = problem, policy
        self._limit, self._held = problem.memory_limits[rank], 0.0
        self._weights: list[int] = []
        stages = stages_on(problem.placement, rank)
        m = problem.num_microbatches
        self._stages = stages
        firsts = [(stage * m, problem.first_input_gradient + stage * m) for stage in stages]
        peaks = [
            max(problem.memory_growth[f], problem.memory_growth[f] + problem.memory_growth[b])
            for f, b in firsts
        ]
        self._forwards = [_Queue(f, m, sum(peaks[place:])) for place, (f, _) in enumerate(firsts)]
        self._inputs = [_Queue(b, m, max(problem.memory_growth[b], 0.0)) for _, b in firsts]

    def run(self, task: int, now: float) -> None:
        """Append a task to the order; it ends at ``busy_until``."""
        problem = self._problem
        self.order.append(task)
        self._held += problem.memory_growth[task]
        self.busy_until = now + problem.seconds[task]
        phase_index = problem.phase_index(task)
        if phase_index == 2:
            self._weights.pop(0)
            return
        queues = self._inputs if phase_index else self._forwards
        queues[self._stages.index(problem.stage(task))].next += 1
        if phase_index:
            self._weights.append(task + problem.first_input_gradient)

    def choose(self, now: float, arrived: Sequence[float]) -> tuple[int, float]:
        """The task to run now, or -1 and the time at which the next is known to arrive."""
        policy, seconds = self._policy, self._problem.seconds
        inputs, next_input, blocked_input = self._oldest(self._inputs, now, arrived)
        if inputs >= 0 and not policy.forward_first:
            return inputs, 0.0
        forward, next_forward, blocked = self._oldest(self._forwards, now, arrived)
        if forward >= 0 and self._warming_up and next_input < now + policy.patience * seconds[forward]:
            forward = -1
        for task in (forward, inputs) if policy.forward_first else (inputs, forward):
            if task >= 0:
                return task, 0.0
        upcoming = min(next_input, next_forward)
        if self._weights:
            weight = self._weights[0]
            if blocked or blocked_input or upcoming >= now + policy.fill * seconds[weight]:
                return weight, 0.0
        return -1, upcoming

    @property
    def _warming_up(self) -> bool:
        return all(queue.next == queue.first for queue in self._inputs)

    def _oldest(self, queues: list[_Queue], now: float, arrived: Sequence[float]) -> tuple[int, float, bool]:
        """The oldest task that can run, or -1; when the next one arrives; whether one lacks memory."""
        best, oldest, later, blocked = -1, self._problem.num_microbatches, _NEVER, False
        for place, queue in enumerate(queues):
            task = queue.next
            if task == queue.end:
                continue
            if arrived[task] > now:
                if arrived[task] < later and self._fits(queue, place):
                    later = arrived[task]
            elif not self._fits(queue, place):
                blocked = True
            elif task - queue.first < oldest:
                best, oldest = task, task - queue.first
        return best, later, blocked

    def _fits(self, queue: _Queue, place: int) -> bool:
        if self._held + queue.required_memory > self._limit:
            return False
        in_flight = self._forwards[place].next - self._forwards[place].first
        in_flight -= self._inputs[place].next - self._inputs[place].first
        return queue is self._inputs[place] or in_flight < self._policy.max_in_flight[self._stages[place]]
