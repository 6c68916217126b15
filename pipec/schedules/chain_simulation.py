"""A schedule on a plain chain of stages: lowered, verified and simulated."""

from dataclasses import replace
from time import perf_counter

from pipec.ir import (
    NO_SYNC,
    Bucket,
    Op,
    Placement,
    Plan,
    Program,
    RepresentativeRanks,
    Schedule,
    SyncSpec,
    Value,
)
from pipec.programs.lower import bare_plan, chain_links, lower
from pipec.programs.representative_replicas import representative_programs
from pipec.programs.verify import verify_step
from pipec.schedules.workload import Workload
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate


def chain_sync_spec(placement: Placement, seconds: float) -> SyncSpec:
    """A sync spec in which the replicas of a stage sum all its gradients at once, in ``seconds``."""
    replicated = [stage for stage, ranks in enumerate(placement) if len(ranks) > 1]
    parameters = {stage: (Value(f"w_{stage}", "float32", (1,)),) for stage in replicated}
    return SyncSpec(tuple(Bucket(stage, parameters[stage], reduce_seconds=seconds) for stage in replicated))


def simulate_schedule(
    schedule: Schedule, work: Workload, sync_spec: SyncSpec = NO_SYNC
) -> tuple[Timeline, float]:
    """The timeline of a schedule on a plain chain of stages, and the seconds to lower and verify it.

    Of many equal replicas, one of each kind is simulated.

    Raises:
        VerifyError: the schedule is broken.
    """
    links = chain_links(schedule.num_stages)
    if schedule.stream is not None:
        sync_spec = replace(sync_spec, updates=True, stream=schedule.stream)
    costs = replace(
        work.costs(schedule, links),
        sync_times={
            (Op.REDUCE_GRAD, bucket.stage, number): bucket.reduce_seconds
            for number, bucket in enumerate(sync_spec.buckets)
        },
    )
    begun = perf_counter()
    programs = representative_programs(schedule, bare_plan(schedule, links, sync_spec), _verified)
    seconds = perf_counter() - begun
    representatives = RepresentativeRanks.of(schedule.placement, [each.rank for each in programs])
    timeline = simulate(programs, costs)
    return replace(timeline, sync_spec=sync_spec, representatives=representatives), seconds


def _verified(schedule: Schedule, plan: Plan) -> tuple[Program, ...]:
    programs = lower(schedule, plan)
    verify_step(plan, programs)
    return programs
