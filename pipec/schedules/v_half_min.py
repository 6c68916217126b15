"""V-Half and V-Min: half and a third of 1F1B's memory, on a V of two stages per rank (Qi et al., 2024).

"Pipeline Parallelism with Controllable Memory" builds a schedule from the tasks of one microbatch at fixed
slots, repeated every six slots; the slots determine how long activations live. Then the schedule is squeezed:
each rank runs the tasks in the order of their slots as early as it can, and weight gradients where nothing
else can run. A forward, or a backward once the forwards are done, may overtake up to ``reach`` tasks that
cannot run yet, if that keeps the peak. The best of a few reaches is chosen, for phases of equal length.
"""

from collections.abc import Callable, Iterator

from pipec.ir import Schedule
from pipec.schedules.order_builder import v_placement
from pipec.schedules.search.ordering_problem import OrderingProblem, make_ordering_problem
from pipec.schedules.search.patterns import follow_patterns
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
            found = follow_patterns(problem, patterns, reach)
            if found:
                yield problem.schedule("v", found.orders)


def _best(name: str, num_ranks: int, num_microbatches: int, slots: Slots, peak: int) -> Schedule:
    problem = _unit_problem(num_ranks, num_microbatches, 2 * peak)
    patterns = _patterns(problem, slots)
    found = filter(None, (follow_patterns(problem, patterns, reach) for reach in _REACHES))
    return problem.schedule(name, min(found, key=lambda each: each.makespan).orders)


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
