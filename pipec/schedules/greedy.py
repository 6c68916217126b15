"""A greedy schedule under a memory limit: whenever a rank is free it takes the best cell that can run."""

import heapq
import math
from dataclasses import dataclass

from pipec.schedules.search_problem import Orders, Problem

_FORWARD, _INPUT, _WEIGHT = range(3)


@dataclass(frozen=True, slots=True)
class Policy:
    """What a rank prefers.

    ``fill``: a weight gradient runs in a pause of at least this share of its own time, and always where
    memory is what stops a forward. ``patience``: a forward is put off if an input gradient arrives within
    this share of its time. ``forward_first``: before input gradients that can run as well.
    ``caps[stage]`` bounds the microbatches between forward and input gradient.
    """

    fill: float
    patience: float
    forward_first: bool
    caps: tuple[int, ...]


def greedy(problem: Problem, policy: Policy) -> Orders | None:
    """The orders that ``policy`` leads to; None if it comes to a halt for lack of memory.

    Ranks take turns in the order of time. Time: n log n in the number of cells.
    """
    ranks = [_Rank(problem, policy, rank) for rank in range(problem.num_ranks)]
    events = [(0.0, rank) for rank in range(problem.num_ranks)]
    arrived = [math.inf] * len(problem.needs)
    arrived[: problem.num_microbatches] = [0.0] * problem.num_microbatches
    while events:
        now, number = heapq.heappop(events)
        rank = ranks[number]
        if now < rank.busy_until:
            continue
        cell, wake = rank.choose(now, arrived)
        if cell < 0:
            if wake < math.inf:
                heapq.heappush(events, (wake, number))
            continue
        end = rank.run(cell, now)
        heapq.heappush(events, (end, number))
        for reader in problem.readers[cell]:
            if reader < problem.first_weight:
                arrived[reader] = end + problem.lags[reader]
                heapq.heappush(events, (arrived[reader], problem.placement[problem.stage(reader)]))
    orders = [rank.order for rank in ranks]
    return orders if sum(map(len, orders)) == len(problem.needs) else None


class _Rank:
    """One rank as it chooses: how far each of its stages has come, and what it holds."""

    def __init__(self, problem: Problem, policy: Policy, rank: int) -> None:
        self.order: list[int] = []
        self.busy_until = 0.0
        self._problem, self._policy = problem, policy
        self._stages = [stage for stage, where in enumerate(problem.placement) if where == rank]
        self._done = [dict.fromkeys(self._stages, 0) for _ in (_FORWARD, _INPUT)]
        self._held = 0.0
        self._weights: list[int] = []

    def run(self, cell: int, now: float) -> float:
        """Run a cell; returns when it ends."""
        problem = self._problem
        kind, stage = problem.kind(cell), problem.stage(cell)
        self.order.append(cell)
        self._held += problem.holds[cell]
        self.busy_until = now + problem.seconds[cell]
        if kind == _WEIGHT:
            self._weights.pop(0)
        else:
            self._done[kind][stage] += 1
            if kind == _INPUT:
                self._weights.append(problem.readers[cell][-1])
        return self.busy_until

    def choose(self, now: float, arrived: list[float]) -> tuple[int, float]:
        """The cell to run now, or -1 and the time at which the next is known to arrive."""
        inputs, next_input = self._pick(self._input_cells(), now, arrived)
        allowed, blocked = self._forward_cells(now, arrived)
        forwards, next_forward = self._pick(allowed, now, arrived)
        policy, seconds = self._policy, self._problem.seconds
        if forwards >= 0 and next_input < now + policy.patience * seconds[forwards]:
            forwards = -1
        for cell in (forwards, inputs) if policy.forward_first else (inputs, forwards):
            if cell >= 0:
                return cell, 0.0
        upcoming = min(next_input, next_forward)
        if self._weights:
            weight = self._weights[0]
            if blocked or upcoming >= now + policy.fill * seconds[weight]:
                return weight, 0.0
        return -1, upcoming

    def _pick(self, cells: list[int], now: float, arrived: list[float]) -> tuple[int, float]:
        """Of the cells whose input is there that of the oldest microbatch, or -1; and when the next arrives."""
        m = self._problem.num_microbatches
        best, later = -1, math.inf
        for cell in cells:
            if arrived[cell] > now:
                later = min(later, arrived[cell])
            elif best < 0 or cell % m < best % m:
                best = cell
        return best, later

    def _input_cells(self) -> list[int]:
        """The next input gradient of each stage that has one, from the last stage down."""
        return [
            self._cell(_INPUT, stage)
            for stage in reversed(self._stages)
            if self._done[_INPUT][stage] < self._done[_FORWARD][stage]
        ]

    def _forward_cells(self, now: float, arrived: list[float]) -> tuple[list[int], bool]:
        """The forwards that fit, and whether one is there that does not.

        A forward leaves room for one microbatch in every later stage of its rank: without, a V fills up
        with microbatches that none of its ranks can finish.
        """
        problem, allowed, blocked = self._problem, [], False
        for place, stage in enumerate(self._stages):
            done = self._done[_FORWARD][stage]
            if done == problem.num_microbatches:
                continue
            cell = self._cell(_FORWARD, stage)
            needed = problem.holds[cell] * (len(self._stages) - place)
            in_flight = done - self._done[_INPUT][stage]
            if self._held + needed <= problem.limit and in_flight < self._policy.caps[stage]:
                allowed.append(cell)
            else:
                blocked = blocked or arrived[cell] <= now
        return allowed, blocked

    def _cell(self, kind: int, stage: int) -> int:
        problem = self._problem
        return (kind * problem.num_stages + stage) * problem.num_microbatches + self._done[kind][stage]
