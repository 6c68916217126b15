"""The best order found for given costs and memory: every known schedule, a search, and local moves."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from pipec.errors import InfeasibleError, InputError
from pipec.ir import Placement, Schedule, rank_of
from pipec.schedules.chain_simulation import simulate_schedule
from pipec.schedules.order_builder import linear_placement, v_placement
from pipec.schedules.registry import SCHEDULES
from pipec.schedules.search.ordering_problem import OrderingProblem, make_ordering_problem
from pipec.schedules.search.workload import Workload
from pipec.schedules.search.zero_bubble import search
from pipec.schedules.v_half_min import patterns_within_peak


def auto(num_ranks: int, num_microbatches: int, work: Workload) -> Schedule:
    """The schedule of least makespan found, on a straight, looped or V placement, within the memory limit.

    Never worse than the best of ``SCHEDULES`` that fits: those are among the candidates. The simulator
    decides.

    Raises:
        InfeasibleError: nothing fits within the memory limit.
    """
    found = [
        each for each in candidate_schedules(num_ranks, num_microbatches, work) if work.fits_memory(each)
    ]
    if not found:
        limit = min(work.memory_limits(num_ranks))
        raise InfeasibleError(
            f"no schedule of {num_ranks} ranks and {num_microbatches} microbatches stays within a memory "
            f"limit of {limit:g}; raise the limit, use smaller microbatches or recompute"
        )
    best = min(found, key=lambda schedule: simulate_schedule(schedule, work)[0].makespan)
    return replace(best, name="auto")


def candidate_schedules(
    num_ranks: int, num_microbatches: int, work: Workload, placement: Placement | None = None
) -> list[Schedule]:
    """Every schedule of ``SCHEDULES`` that can do with these counts, and orders found from them.

    The search for those is on the straight and the V placement, within the memory limit. All have as many
    stages as ``work`` knows the costs of and, if ``placement`` is given, have them there.
    """

    def is_wanted(where: Placement) -> bool:
        return work.has_costs_of(where) and placement in (None, where)

    known = [each for each in fixed_schedules(num_ranks, num_microbatches) if is_wanted(each.placement)]
    fitting = [schedule for schedule in known if work.fits_memory(schedule)]
    searched = filter(is_wanted, (linear_placement(num_ranks), v_placement(num_ranks)))
    return [*known, *_searched(searched, num_microbatches, work, fitting)]


def fixed_schedules(num_ranks: int, num_microbatches: int) -> list[Schedule]:
    """Every schedule of ``SCHEDULES`` that can do with these counts."""
    found = []
    for make in SCHEDULES.values():
        with suppress(InputError):
            found.append(make(num_ranks, num_microbatches))
    return found


def _searched(
    placements: Iterable[Placement], m: int, work: Workload, fitting: list[Schedule]
) -> Iterator[Schedule]:
    for placement in placements:
        problem = make_ordering_problem(placement, m, work, work.available_memory(placement))
        known = [schedule for schedule in fitting if schedule.placement == placement]
        if placement == v_placement(problem.num_ranks):
            known += patterns_within_peak(problem.num_ranks, m, _most_chunks(problem, work))
        try:
            yield problem.schedule("auto", search(problem, map(problem.orders, known), by_span=False))
        except InfeasibleError:  # the other placement may fit
            continue


def _most_chunks(problem: OrderingProblem, work: Workload) -> int:
    """How many stage-microbatches every rank has room for, whichever of its stages they are of."""
    memory = work.for_placement(problem.placement).memory
    largest = [0.0] * problem.num_ranks
    for number, stage in enumerate(memory):
        rank = rank_of(problem.placement, number)
        largest[rank] = max(largest[rank], stage.saved, stage.weight_gradient_saved)
    most = 2 * problem.num_microbatches
    fitting = (limit / one for limit, one in zip(problem.memory_limits, largest, strict=True) if one)
    return int(min(most, *fitting))
