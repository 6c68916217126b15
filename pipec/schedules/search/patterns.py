"""Orders that follow a pattern: each rank runs its tasks in turn, and weight gradients in the pauses.

No task waits for a weight gradient, so it can wait for a pause that is long enough, or until its memory is
needed. A pattern only orders the other tasks. A rank may let a task overtake a few that cannot run yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipec.schedules.search.greedy import list_scheduling
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
    ranks = [
        _Rank(problem, pattern[::-1], problem.memory_limits[rank], reach, starts)
        for rank, pattern in enumerate(patterns)
    ]
    orders = list_scheduling(problem, ranks)
    return FollowedPatterns(orders, starts, max(rank.busy_until for rank in ranks)) if orders else None


@dataclass
class _Rank:
    """A rank on its way. ``ahead`` are the remaining tasks of its pattern, the next one at the end."""

    problem: OrderingProblem
    ahead: list[int]
    limit: float
    reach: int
    starts: list[float]
    order: list[int] = field(default_factory=list)
    busy_until: float = 0.0
    weights: list[int] = field(default_factory=list)
    held: float = 0.0
    forwards: int = field(init=False)

    def __post_init__(self) -> None:
        self.forwards = sum(self._is_forward(task) for task in self.ahead)

    def run(self, task: int, now: float) -> None:
        """Append a task to the order; it ends at ``busy_until``."""
        self.order.append(task)
        self.busy_until = now + self.problem.seconds[task]
        self.held += self.problem.memory_growth[task]
        if self.weights and task == self.weights[0]:
            self.weights.pop(0)
            return
        self.starts[task] = now
        self.ahead.pop(self.ahead.index(task, max(0, len(self.ahead) - 1 - self.reach)))
        if self._is_forward(task):
            self.forwards -= 1
        else:
            self.weights.append(task + self.problem.first_input_gradient)

    def choose(self, now: float, arrived: Sequence[float]) -> tuple[int, float]:
        """The first task within ``reach`` that can run, else a weight gradient.

        A forward holds memory while those it overtakes run, each backward followed by its weight gradient.
        """
        growth, seconds = self.problem.memory_growth, self.problem.seconds
        held = self.held + sum(growth[weight] for weight in self.weights)
        highest, blocked = self.held, False
        reached = self.ahead[-1 : -2 - self.reach : -1]
        for number, task in enumerate(reached):
            if self._is_forward(task):
                fits, after = highest + growth[task] <= self.limit, growth[task]
            else:
                fits = number == 0 or not self.forwards
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
