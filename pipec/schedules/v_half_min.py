"""V-Half and V-Min: half and a third of 1F1B's memory, on a V of two stages per rank (Qi et al., 2024).

"Pipeline Parallelism with Controllable Memory" builds a schedule from the tasks of one microbatch at fixed
slots, repeated every six slots; the slots determine how long activations live. Then the schedule is squeezed:
each rank runs the tasks in the order of their slots as early as it can, and weight gradients where nothing
else can run. A forward, or a backward once the forwards are done, may overtake up to ``reach`` tasks that
cannot run yet, if that keeps the peak. The best of a few reaches is chosen, for phases of equal length.
"""

from collections.abc import Callable, Iterator, Sequence

from pipec.ir import Schedule
from pipec.schedules.order_builder import v_placement
from pipec.schedules.search.greedy import Rank, list_scheduling
from pipec.schedules.search.ordering_problem import OrderingProblem, TaskOrders, make_ordering_problem
from pipec.schedules.search.workload import Workload

_PERIOD = 6
_REACHES = (0, 1, 2)
_LONG_REACH = 3

Slots = Callable[[int, int], tuple[int, int, int, int]]
"""Of rank i of p: the slots of F down, F up, B up and B down of microbatch 0."""


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """At most 2 * ((p+2)//2) stage-microbatches in flight: those of (p+2)//2 microbatches, where 1F1B has p.

    Choose it when ZB-V does not fit. Warmup and cooldown are longer, and the steady state has no bubbles if
    F, B and W of a stage all cost the same.
    """
    return _best("v-half", num_ranks, num_microbatches, _half_slots, (num_ranks + 2) // 2)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """At most 2 * ((p+4)//3) stage-microbatches in flight: those of (p+4)//3 microbatches, where 1F1B has p.

    No other schedule needs less memory without recomputing. When the phases of a stage differ in length,
    bubbles return with every microbatch.
    """
    return _best("v-min", num_ranks, num_microbatches, _min_slots, (num_ranks + 4) // 3)


def _half_slots(p: int, i: int) -> tuple[int, int, int, int]:
    delta = 0 if p % 2 else 3
    return 2 * i, 3 * p - i - 2, 3 * p + delta + 2 * i - 1, 6 * p + delta - i - 2


def _min_slots(p: int, i: int) -> tuple[int, int, int, int]:
    delta = 0 if p % 3 else 2
    return i, 2 * p - i - 1, 2 * p + delta + i, 4 * p + delta - i - 1


def patterns_within_peak(num_ranks: int, num_microbatches: int, peak: int) -> Iterator[Schedule]:
    """Both patterns squeezed to ``peak`` stage-microbatches on each rank, in every way that finishes."""
    problem = _unit_problem(num_ranks, num_microbatches, peak)
    for slots in (_half_slots, _min_slots):
        patterns = _patterns(problem, slots)
        for reach in (*_REACHES, _LONG_REACH):
            if found := _squeezed(problem, patterns, reach):
                yield problem.schedule("v", found[1])


def _best(name: str, num_ranks: int, num_microbatches: int, slots: Slots, peak: int) -> Schedule:
    problem = _unit_problem(num_ranks, num_microbatches, 2 * peak)
    patterns = _patterns(problem, slots)
    found = filter(None, (_squeezed(problem, patterns, reach) for reach in _REACHES))
    return problem.schedule(name, min(found, key=lambda each: each[0])[1])


def _unit_problem(num_ranks: int, num_microbatches: int, peak: int) -> OrderingProblem:
    """All phases take one unit of time, and every stage-microbatch one of memory."""
    work = Workload.uniform(2 * num_ranks)
    return make_ordering_problem(v_placement(num_ranks), num_microbatches, work, [peak] * num_ranks)


def _patterns(problem: OrderingProblem, slots: Slots) -> list[list[int]]:
    """Forwards and input gradients of each rank in the order of their slots; no two of a rank share one."""
    p, m = problem.num_ranks, problem.num_microbatches

    def pattern(rank: int) -> list[int]:
        down, up = rank * m, (2 * p - 1 - rank) * m
        firsts = (down, up, problem.first_input_gradient + up, problem.first_input_gradient + down)
        tasks = [
            (_PERIOD * microbatch + slot, first + microbatch)
            for first, slot in zip(firsts, slots(p, rank), strict=True)
            for microbatch in range(m)
        ]
        return [task for _, task in sorted(tasks)]

    return [pattern(rank) for rank in range(p)]


def _squeezed(problem: OrderingProblem, patterns: TaskOrders, reach: int) -> tuple[float, TaskOrders] | None:
    """The makespan and the orders of ranks that follow patterns; None if they stop for lack of memory."""
    ranks = [_PatternRank(problem, rank, pattern, reach) for rank, pattern in enumerate(patterns)]
    orders = list_scheduling(problem, ranks)
    return (max(rank.busy_until for rank in ranks), orders) if orders else None


class _PatternRank(Rank):
    """A rank on its way. ``_ahead`` are the remaining tasks of its pattern, the next one at the end."""

    def __init__(self, problem: OrderingProblem, rank: int, pattern: Sequence[int], reach: int) -> None:
        super().__init__(problem, problem.memory_limits[rank])
        self._ahead, self._reach = [*reversed(pattern)], reach
        self._forwards = sum(map(self._is_forward, pattern))

    def run(self, task: int, now: float) -> None:
        super().run(task, now)
        if task < self.problem.first_weight_gradient:
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
