"""Greedy schedules: whenever a rank is free it chooses its next task, and no choice is ever undone.

``list_scheduling`` advances the time and lets each rank choose. Ranks here follow a ``GreedyPolicy`` under a
memory limit; those of V-Half and V-Min follow a given order.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipec.ir import stages_on
from pipec.schedules.search.ordering_problem import OrderingProblem, TaskOrders

_NEVER = math.inf


@dataclass
class Rank:
    """A rank that chooses its tasks one by one: its order so far, and the weight gradients it has put off."""

    problem: OrderingProblem
    limit: float
    order: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    busy_until: float = 0.0
    held: float = 0.0

    def choose(self, now: float, arrived: Sequence[float]) -> tuple[int, float]:
        """The task to run now, or -1 and the time at which the next is known to arrive.

        ``arrived[task]`` is when the input of a forward or input gradient arrives: infinity if not known yet.
        """
        raise NotImplementedError

    def run(self, task: int, now: float) -> None:
        """Append a task to the order; it ends at ``busy_until``."""
        self.order.append(task)
        self.busy_until = now + self.problem.seconds[task]
        self.held += self.problem.memory_growth[task]
        if task >= self.problem.first_weight_gradient:
            self.weights.remove(task)
        elif task >= self.problem.first_input_gradient:
            self.weights.append(task + self.problem.first_input_gradient)


def list_scheduling(problem: OrderingProblem, ranks: Sequence[Rank]) -> TaskOrders | None:
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
    """A rank runs input gradients before forwards, and a weight gradient if neither can run.

    ``patience``: a rank that has run no input gradient yet delays a forward if an input gradient arrives
    within this fraction of the forward's time. ``max_in_flight[stage]``: the most microbatches between
    forward and input gradient.
    """

    patience: float
    max_in_flight: tuple[int, ...]


def greedy_orders(problem: OrderingProblem, policy: GreedyPolicy) -> TaskOrders | None:
    """The orders that ``policy`` leads to; None if ranks stop for lack of memory."""
    return list_scheduling(problem, [_GreedyRank(problem, policy, rank) for rank in range(problem.num_ranks)])


class _Queue:
    """The forwards, or the input gradients, of one stage: tasks ``first`` to ``end``, and the next to run.

    ``required_memory`` must be free when a task starts. A forward leaves memory for one microbatch in every
    later stage of its rank. Otherwise a V would fill up with microbatches that none of its ranks can finish.
    """

    def __init__(self, first: int, num_microbatches: int, required_memory: float) -> None:
        self.next, self.end = first, first + num_microbatches
        self.first, self.required_memory = first, required_memory


class _GreedyRank(Rank):
    """A rank that chooses by a policy from the next tasks of each of its stages."""

    def __init__(self, problem: OrderingProblem, policy: GreedyPolicy, rank: int) -> None:
        super().__init__(problem, problem.memory_limits[rank])
        self._policy, self._stages, m = policy, stages_on(problem.placement, rank), problem.num_microbatches
        firsts = [(stage * m, problem.first_input_gradient + stage * m) for stage in self._stages]
        growth = problem.memory_growth
        peaks = [max(growth[f], growth[f] + growth[b]) for f, b in firsts]
        self._forwards = [_Queue(f, m, sum(peaks[place:])) for place, (f, _) in enumerate(firsts)]
        self._inputs = [_Queue(b, m, max(growth[b], 0.0)) for _, b in firsts]

    def run(self, task: int, now: float) -> None:
        super().run(task, now)
        if task < self.problem.first_weight_gradient:
            queues = self._inputs if self.problem.phase_index(task) else self._forwards
            queues[self._stages.index(self.problem.stage(task))].next += 1

    def choose(self, now: float, arrived: Sequence[float]) -> tuple[int, float]:
        task, next_input = self._oldest(self._inputs, now, arrived)
        if task >= 0:
            return task, 0.0
        task, next_forward = self._oldest(self._forwards, now, arrived)
        if task >= 0 and self._warming_up:
            patience = self._policy.patience * self.problem.seconds[task]
            task = -1 if next_input < now + patience else task
        if task < 0 and self.weights:
            task = self.weights[0]
        return task, min(next_input, next_forward)

    @property
    def _warming_up(self) -> bool:
        return all(queue.next == queue.first for queue in self._inputs)

    def _oldest(self, queues: list[_Queue], now: float, arrived: Sequence[float]) -> tuple[int, float]:
        """The oldest task that can run, or -1, and when the next one arrives."""
        best, oldest, later = -1, self.problem.num_microbatches, _NEVER
        for place, queue in enumerate(queues):
            if queue.next == queue.end or not self._fits(queue, place):
                continue
            task = queue.next
            if arrived[task] > now:
                later = min(later, arrived[task])
            elif task - queue.first < oldest:
                best, oldest = task, task - queue.first
        return best, later

    def _fits(self, queue: _Queue, place: int) -> bool:
        if self.held + queue.required_memory > self.limit:
            return False
        in_flight = self._forwards[place].next - self._forwards[place].first
        in_flight -= self._inputs[place].next - self._inputs[place].first
        return queue is self._inputs[place] or in_flight < self._policy.max_in_flight[self._stages[place]]
