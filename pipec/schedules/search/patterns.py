"""Orders that follow a pattern: each rank runs its tasks in turn, and weight gradients in the pauses.

No task waits for a weight gradient, so it can wait for a pause that is long enough, or until its memory is
needed. A pattern only orders the other tasks. A rank may let a task overtake a few that cannot run yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipec.schedules.search.greedy import Rank, list_scheduling
from pipec.schedules.search.ordering_problem import OrderingProblem, TaskOrders


@dataclass(frozen=True, slots=True)
class FollowedPatterns:
    """The orders with all tasks, when each of a pattern starts, and the makespan."""

    orders: TaskOrders
    starts: Sequence[float]
    makespan: float

    @property
    def mean_start(self) -> float:
        """The mean start of the tasks of the patterns."""
        return sum(self.starts) / len(self.starts)


def follow_patterns(
    problem: OrderingProblem, patterns: TaskOrders, reach: int = 0
) -> FollowedPatterns | None:
    """What follows from patterns of forwards and input gradients; None if ranks stop for lack of memory.

    A forward, or a backward once the forwards are done, may overtake up to ``reach`` tasks that cannot run
    yet, if memory suffices for these as well.
    """
    starts = [0.0] * problem.first_weight_gradient
    ranks = [_PatternRank(problem, rank, pattern, reach, starts) for rank, pattern in enumerate(patterns)]
    orders = list_scheduling(problem, ranks)
    return FollowedPatterns(orders, starts, max(rank.busy_until for rank in ranks)) if orders else None


class _PatternRank(Rank):
    """A rank on its way. ``_ahead`` are the remaining tasks of its pattern, the next one at the end."""

    def __init__(
        self, problem: OrderingProblem, rank: int, pattern: Sequence[int], reach: int, starts: list[float]
    ) -> None:
        super().__init__(problem, problem.memory_limits[rank])
        self._ahead, self._reach, self._starts = [*reversed(pattern)], reach, starts
        self._forwards = sum(map(self._is_forward, pattern))

    def run(self, task: int, now: float) -> None:
        super().run(task, now)
        if task < self.problem.first_weight_gradient:
            self._starts[task] = now
            self._ahead.pop(self._ahead.index(task, max(0, len(self._ahead) - 1 - self._reach)))
            self._forwards -= self._is_forward(task)

    def choose(self, now: float, arrived: Sequence[float]) -> tuple[int, float]:
        """The first task within ``reach`` that can run, else a weight gradient.

        A forward holds memory while those it overtakes run, each backward followed by its weight gradient.
        """
        growth, seconds = self.problem.memory_growth, self.problem.seconds
        held = self.held + sum(growth[weight] for weight in self.weights)
        highest, blocked = self.held, False
        reached = self._ahead[-1 : -2 - self._reach : -1]
        for number, task in enumerate(reached):
            if self._is_forward(task):
                fits, after = highest + growth[task] <= self.limit, growth[task]
            else:
                fits = number == 0 or not self._forwards
                after = growth[task] + growth[task + self.problem.first_input_gradient]
            if arrived[task] <= now:
                if fits:
                    return task, 0.0
                blocked = True
            held += after
            highest = max(highest, held)
        upcoming = min((arrived[task] for task in reached if arrived[task] > now), default=float("inf"))
        if self.weights and (blocked or now + seconds[self.weights[0]] <= upcoming):
            return self.weights[0], 0.0
        return -1, upcoming

    def _is_forward(self, task: int) -> bool:
        return task < self.problem.first_input_gradient
