"""A schedule on a plain chain of stages: lowered, verified and simulated."""

from dataclasses import replace
from time import perf_counter

from pipec.ir import NOTHING_MORE, Bucket, Ending, Op, Placement, Schedule, Value
from pipec.programs.alike import few_replicas
from pipec.programs.lower import chain_links, lower
from pipec.programs.verify import verify_programs
from pipec.schedules.search.workload import Workload
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate


def chain_ending(placement: Placement, seconds: float) -> Ending:
    """The replicas of a stage sum all its gradients at once, which takes so many ``seconds``."""
    replicated = [stage for stage, ranks in enumerate(placement) if len(ranks) > 1]
    parameters = {stage: (Value(f"w_{stage}", "float32", (1,)),) for stage in replicated}
    return Ending(tuple(Bucket(stage, parameters[stage], reduce_seconds=seconds) for stage in replicated))


def simulate_schedule(
    schedule: Schedule, work: Workload, ending: Ending = NOTHING_MORE
) -> tuple[Timeline, float]:
    """The timeline of a schedule on a plain chain of stages, and the seconds to lower and verify it.

    Of many replicas that are alike, it is that of a few.

    Raises:
        VerifyError: the schedule is broken.
    """
    links = chain_links(schedule.num_stages)
    if schedule.stream is not None:
        ending = replace(ending, updates=True, stream=schedule.stream)
    begun = perf_counter()
    few = few_replicas(schedule)
    schedule = few.schedule if few else schedule
    programs = lower(schedule, links, ending=ending)
    verify_programs(programs, schedule.placement, links, schedule.num_microbatches, ending=ending)
    seconds = perf_counter() - begun
    endings = {
        (Op.REDUCE_GRAD, bucket.stage, number): bucket.reduce_seconds
        for number, bucket in enumerate(ending.buckets)
    }
    timeline = simulate(programs, replace(work.costs(schedule, links), endings=endings), few)
    return replace(timeline, ending=ending), seconds
