"""``auto``: the best schedule for given costs and memory, of all fixed schedules and of searched orders."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from pipec.errors import InfeasibleError, InputError
from pipec.ir import Placement, Schedule, rank_of
from pipec.schedules.chain_simulation import simulate_schedule
from pipec.schedules.named import SCHEDULES
from pipec.schedules.order_builder import linear_placement, v_placement
from pipec.schedules.search.ordering_problem import OrderingProblem, make_ordering_problem
from pipec.schedules.search.workload import Workload
from pipec.schedules.search.zero_bubble import search
from pipec.schedules.v_half_min import patterns_within_peak


def auto(num_ranks: int, num_microbatches: int, work: Workload) -> Schedule:
    """The schedule of least simulated makespan within the memory limit, of all ``candidate_schedules``.

    Placements are straight, looped or a V. The result is never worse than the best of ``SCHEDULES`` that
    fits, because these are candidates, too.

    Raises:
        InfeasibleError: no candidate fits within the memory limit.
    """
    fitting = [
        each for each in candidate_schedules(num_ranks, num_microbatches, work) if work.fits_memory(each)
    ]
    if not fitting:
        limit = min(work.memory_limits(num_ranks))
        raise InfeasibleError(
            f"no schedule of {num_ranks} ranks and {num_microbatches} microbatches stays within a memory "
            f"limit of {limit:g}; raise the limit, use smaller microbatches or recompute"
        )
    best = min(fitting, key=lambda schedule: simulate_schedule(schedule, work)[0].makespan)
    return replace(best, name="auto")


def candidate_schedules(
    num_ranks: int, num_microbatches: int, work: Workload, placement: Placement | None = None
) -> list[Schedule]:
    """Every schedule of ``SCHEDULES`` for these counts, and schedules that a search finds from them.

    The search is on the straight and the V placement, within the memory limit. Only placements for which
    ``work`` has the costs of every stage are considered, and only ``placement`` if it is given.
    """

    def is_wanted(each: Placement) -> bool:
        return work.has_costs_of(each) and placement in (None, each)

    fixed = [each for each in fixed_schedules(num_ranks, num_microbatches) if is_wanted(each.placement)]
    fitting = [schedule for schedule in fixed if work.fits_memory(schedule)]
    placements = filter(is_wanted, (linear_placement(num_ranks), v_placement(num_ranks)))
    return [*fixed, *_searched(placements, num_microbatches, work, fitting)]


def fixed_schedules(num_ranks: int, num_microbatches: int) -> list[Schedule]:
    """Every schedule of ``SCHEDULES`` that exists for these counts."""
    schedules = []
    for make in SCHEDULES.values():
        with suppress(InputError):
            schedules.append(make(num_ranks, num_microbatches))
    return schedules


def _searched(
    placements: Iterable[Placement], m: int, work: Workload, fitting: list[Schedule]
) -> Iterator[Schedule]:
    for placement in placements:
        problem = make_ordering_problem(placement, m, work, work.available_memory(placement))
        starts = [schedule for schedule in fitting if schedule.placement == placement]
        if placement == v_placement(problem.num_ranks):
            starts += patterns_within_peak(problem.num_ranks, m, _max_in_flight(problem, work))
        try:
            yield problem.schedule("auto", search(problem, map(problem.orders, starts), by_span=False))
        except InfeasibleError:  # the other placement may fit
            continue


def _max_in_flight(problem: OrderingProblem, work: Workload) -> int:
    """The number of stage-microbatches, of any of its stages, for which every rank has memory."""
    memory = work.for_placement(problem.placement).memory
    largest = [0.0] * problem.num_ranks
    for number, stage in enumerate(memory):
        rank = rank_of(problem.placement, number)
        largest[rank] = max(largest[rank], stage.saved, stage.weight_gradient_saved)
    fitting = (limit / one for limit, one in zip(problem.memory_limits, largest, strict=True) if one)
    return int(min(2 * problem.num_microbatches, *fitting))
