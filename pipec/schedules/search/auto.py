"""The best order found for given costs and memory: every known schedule, a search, and local moves."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from pipec.errors import InfeasibleError, InputError
from pipec.ir import Schedule
from pipec.programs.lower import chain_links, lower
from pipec.schedules.fixed import SCHEDULES
from pipec.schedules.orders import straight_placement, v_placement
from pipec.schedules.search.problem import make_problem
from pipec.schedules.search.workload import Workload
from pipec.schedules.search.zero_bubble import search
from pipec.schedules.v_half_min import within_peak
from pipec.timeline.simulate import simulate


def auto(num_ranks: int, num_microbatches: int, work: Workload) -> Schedule:
    """The schedule of least makespan found, on a straight, looped or V placement, within the memory limit.

    Never worse than the best of ``SCHEDULES`` that fits: those are among the candidates. The simulator
    decides.

    Raises:
        InfeasibleError: nothing fits within the memory limit.
    """
    found = [each for each in candidates(num_ranks, num_microbatches, work) if work.fits(each)]
    if not found:
        raise InfeasibleError(
            f"no schedule of {num_ranks} ranks and {num_microbatches} microbatches stays within a memory "
            f"limit of {work.memory_limit:g}; raise the limit, use smaller microbatches or recompute"
        )
    return replace(min(found, key=lambda schedule: makespan(schedule, work)), name="auto")


def candidates(
    num_ranks: int, num_microbatches: int, work: Workload, placement: tuple[int, ...] | None = None
) -> list[Schedule]:
    """Every schedule of ``SCHEDULES`` that can do with these counts, and orders found from them.

    The search for those is on the straight and the V placement, within the memory limit. With a
    ``placement``, only what has its stages there.
    """
    known = [each for each in named(num_ranks, num_microbatches) if placement in (None, each.placement)]
    fitting = [schedule for schedule in known if work.fits(schedule)]
    searched = [straight_placement(num_ranks), v_placement(num_ranks)]
    wanted = [each for each in searched if placement in (None, each)]
    return [*known, *_searched(wanted, num_microbatches, work, fitting)]


def makespan(schedule: Schedule, work: Workload) -> float:
    """How long the simulator says a step takes on a plain chain of stages."""
    links = chain_links(schedule.num_stages)
    return simulate(lower(schedule, links), work.costs(schedule, links)).makespan


def named(num_ranks: int, num_microbatches: int) -> list[Schedule]:
    """Every schedule of ``SCHEDULES`` that can do with these counts."""
    found = []
    for make in SCHEDULES.values():
        with suppress(InputError):
            found.append(make(num_ranks, num_microbatches))
    return found


def _searched(
    placements: Iterable[tuple[int, ...]], m: int, work: Workload, fitting: list[Schedule]
) -> Iterator[Schedule]:
    limit = float("inf") if work.memory_limit is None else work.memory_limit
    chunk = max(work.memory_backward, work.memory_weight) / 2
    peak = int(min(limit / chunk + 1e-9, 2 * m))
    for placement in placements:
        num_ranks = max(placement) + 1
        problem = make_problem(placement, m, work, limit)
        known = [schedule for schedule in fitting if schedule.placement == placement]
        if placement == v_placement(num_ranks):
            known += within_peak(num_ranks, m, peak)
        try:
            yield problem.schedule("auto", search(problem, map(problem.orders, known), by_span=False))
        except InfeasibleError:  # the other placement may fit
            continue
