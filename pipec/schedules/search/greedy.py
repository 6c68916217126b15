"""Greedy schedules: whenever a rank is free it chooses what to run next, and nothing is ever taken back.

``choose_orders`` keeps the time and asks the ranks; how they choose is theirs. Here they choose for a
``Policy`` under a memory limit; ``v_half_min`` has ranks that follow a pattern.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipec.ir import stages_on
from pipec.schedules.search.problem import Orders, Problem

_NEVER = math.inf


class ChoosingRank(Protocol):
    """A rank as it makes its order."""

    order: list[int]
    busy_until: float

    def choose(self, now: float, arrived: Sequence[float]) -> tuple[int, float]:
        """The cell to run now, or -1 and the time at which the next is known to arrive.

        ``arrived[cell]`` is when what a forward or input gradient reads is there, as far as that is known.
        """

    def run(self, cell: int, now: float) -> None:
        """Append a cell to the order; it ends at ``busy_until``."""


def choose_orders(problem: Problem, ranks: Sequence[ChoosingRank]) -> Orders | None:
    """The orders that ``ranks`` choose; None if they come to a halt before every cell has run.

    Ranks take turns in the order of time. Time: n log n in the number of cells.
    """
    readers, ranks_of = problem.readers, problem.ranks
    lags, channels = problem.lags, problem.channels
    arrived = [_NEVER] * len(problem.needs)
    arrived[: problem.num_microbatches] = [0.0] * problem.num_microbatches
    free = [0.0] * problem.num_channels
    turns = [(0.0, rank) for rank in range(len(ranks))]
    while turns:
        now, number = heapq.heappop(turns)
        rank = ranks[number]
        if now < rank.busy_until:
            continue
        cell, wake = rank.choose(now, arrived)
        if cell < 0:
            if wake < _NEVER:
                heapq.heappush(turns, (wake, number))
            continue
        rank.run(cell, now)
        end = rank.busy_until
        heapq.heappush(turns, (end, number))
        reader, channel = readers[cell], channels[cell]
        if reader < 0:
            continue
        leaves = end if channel < 0 else max(end, free[channel])
        arrived[reader] = arrives = leaves + lags[cell]
        if channel >= 0:
            free[channel] = arrives
        if ranks[ranks_of[reader]].busy_until <= now:
            heapq.heappush(turns, (arrives, ranks_of[reader]))
    orders = [rank.order for rank in ranks]
    return orders if sum(map(len, orders)) == len(problem.needs) else None


@dataclass(frozen=True, slots=True)
class Policy:
    """What a rank prefers.

    ``fill``: a weight gradient runs in a pause of at least this share of its own time, and always where
    memory is what stops another cell. ``patience``: before the first input gradient of a rank, a forward is
    put off if that gradient arrives within this share of the forward's time. ``forward_first``: before input
    gradients that can run as well. ``caps[stage]`` bounds what is between forward and input gradient.
    """

    fill: float
    patience: float
    forward_first: bool
    caps: tuple[int, ...]


def greedy(problem: Problem, policy: Policy) -> Orders | None:
    """The orders that ``policy`` leads to; None if ranks come to a halt for lack of memory."""
    return choose_orders(problem, [_Rank(problem, policy, rank) for rank in range(problem.num_ranks)])


class _Queue:
    """The forwards, or the input gradients, of one stage: the next cell to run, and the last.

    ``room`` is what must be free when a cell starts. A forward leaves room for one microbatch in every
    later stage of its rank. Otherwise a V would fill up with microbatches that none of its ranks can finish.
    """

    def __init__(self, first: int, num_microbatches: int, room: float) -> None:
        self.next, self.end = first, first + num_microbatches
        self.first, self.room = first, room


class _Rank:
    """One rank as it chooses: how far each of its stages has come, and what it holds."""

    def __init__(self, problem: Problem, policy: Policy, rank: int) -> None:
        self.order: list[int] = []
        self.busy_until = 0.0
        self._problem, self._policy = problem, policy
        self._limit, self._held = problem.limits[rank], 0.0
        self._weights: list[int] = []
        stages = stages_on(problem.placement, rank)
        m = problem.num_microbatches
        self._stages = stages
        firsts = [(stage * m, problem.first_input + stage * m) for stage in stages]
        most = [max(problem.holds[f], problem.holds[f] + problem.holds[b]) for f, b in firsts]
        self._forwards = [_Queue(f, m, sum(most[place:])) for place, (f, _) in enumerate(firsts)]
        self._inputs = [_Queue(b, m, max(problem.holds[b], 0.0)) for _, b in firsts]

    def run(self, cell: int, now: float) -> None:
        """Append a cell to the order; it ends at ``busy_until``."""
        problem = self._problem
        self.order.append(cell)
        self._held += problem.holds[cell]
        self.busy_until = now + problem.seconds[cell]
        kind = problem.kind(cell)
        if kind == 2:
            self._weights.pop(0)
            return
        queues = self._inputs if kind else self._forwards
        queues[self._stages.index(problem.stage(cell))].next += 1
        if kind:
            self._weights.append(cell + problem.first_input)

    def choose(self, now: float, arrived: Sequence[float]) -> tuple[int, float]:
        """The cell to run now, or -1 and the time at which the next is known to arrive."""
        policy, seconds = self._policy, self._problem.seconds
        inputs, next_input, blocked_input = self._oldest(self._inputs, now, arrived)
        if inputs >= 0 and not policy.forward_first:
            return inputs, 0.0
        forward, next_forward, blocked = self._oldest(self._forwards, now, arrived)
        if forward >= 0 and self._warming_up and next_input < now + policy.patience * seconds[forward]:
            forward = -1
        for cell in (forward, inputs) if policy.forward_first else (inputs, forward):
            if cell >= 0:
                return cell, 0.0
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
        """The oldest cell that can run, or -1; when the next arrives; whether one there does not fit."""
        best, oldest, later, blocked = -1, self._problem.num_microbatches, _NEVER, False
        for place, queue in enumerate(queues):
            cell = queue.next
            if cell == queue.end:
                continue
            if arrived[cell] > now:
                if arrived[cell] < later and self._fits(queue, place):
                    later = arrived[cell]
            elif not self._fits(queue, place):
                blocked = True
            elif cell - queue.first < oldest:
                best, oldest = cell, cell - queue.first
        return best, later, blocked

    def _fits(self, queue: _Queue, place: int) -> bool:
        if self._held + queue.room > self._limit:
            return False
        in_flight = self._forwards[place].next - self._forwards[place].first
        in_flight -= self._inputs[place].next - self._inputs[place].first
        return queue is self._inputs[place] or in_flight < self._policy.caps[self._stages[place]]
