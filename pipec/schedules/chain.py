"""A schedule on a plain chain of stages: lowered, verified and simulated."""

from time import perf_counter

from pipec.ir import Schedule
from pipec.programs.lower import chain_links, lower
from pipec.programs.verify import verify_programs
from pipec.schedules.search.workload import Workload
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate


def simulate_schedule(schedule: Schedule, work: Workload) -> tuple[Timeline, float]:
    """The timeline of a schedule on a plain chain of stages, and the seconds to lower and verify it.

    Raises:
        VerifyError: the schedule is broken.
    """
    links = chain_links(schedule.num_stages)
    begun = perf_counter()
    programs = lower(schedule, links)
    verify_programs(programs, schedule.placement, links, schedule.num_microbatches)
    seconds = perf_counter() - begun
    return simulate(programs, work.costs(schedule, links)), seconds
