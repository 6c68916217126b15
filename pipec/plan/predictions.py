"""Predictions of a step from its plan: the timeline, seconds and peak memory."""

from collections.abc import Sequence
from dataclasses import replace

from pipec.ir import Op, Plan, Program, RankMemory, RepresentativeRanks
from pipec.programs.lower_periodic import steady_excerpt
from pipec.programs.rank_memory import rank_memory
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import SimulationCosts, simulate
from pipec.timeline.steady_state import steady_state


def simulate_plan(plan: Plan, programs: Sequence[Program]) -> Timeline:
    """Simulate the programs with the plan's costs, periodic ones for some mini-batches.

    ``programs`` are those of all ranks, or of ranks that represent all.
    """
    compute = {
        (stage.index, phase): time + plan.host.call_seconds
        for stage in plan.stages
        for phase, time in stage.cost.seconds.items()
    }
    messages = dict(zip(plan.links, plan.link_seconds, strict=True))
    sync_times = _collectives(plan)
    for stage in plan.stages:
        for update in (Op.UPDATE, Op.HOST_UPDATE):
            sync_times[update, stage.index, -1] = stage.cost.update_seconds
        if stage.tail:
            sync_times[Op.TAIL, stage.index, -1] = stage.tail.seconds + plan.host.call_seconds
    programs = steady_excerpt(programs, plan.sync_spec.stream, plan.placement)
    representatives = RepresentativeRanks.of(plan.placement, [each.rank for each in programs])
    collective_seconds = {
        (s.index, number): collective.seconds
        for s in plan.stages
        for number, collective in enumerate(s.model_collectives)
    }
    segments = {(s.index, phase): shares for s in plan.stages for phase, shares in s.segments.items()}
    copies = {stage.index: stage.cost.copy_seconds for stage in plan.stages}
    costs = SimulationCosts(
        compute,
        messages,
        sync_times=sync_times,
        segments=segments,
        model_collectives=collective_seconds,
        copy_times=copies,
        start_time=plan.host.step_seconds,
    )
    timeline = simulate(programs, costs)
    return replace(timeline, sync_spec=plan.sync_spec, representatives=representatives)


def plan_memory(plan: Plan, programs: Sequence[Program]) -> list[RankMemory]:
    """The memory that each rank of a plan needs. Periodic programs are followed until their steady state.

    ``programs`` are those of all ranks, or of ranks that represent all.
    """
    excerpt = steady_excerpt(programs, plan.sync_spec.stream, plan.placement)
    needs = {program.rank: rank_memory(plan, program) for program in excerpt}
    few = RepresentativeRanks.of(plan.placement, [*needs])
    return (
        [replace(needs[rank], rank=each) for each, rank in enumerate(few.represented_by)]
        if few
        else [*needs.values()]
    )


def step_seconds(plan: Plan, timeline: Timeline) -> float:
    """The seconds of a step; in a stream, from one mini-batch to the next, checks included."""
    steady = steady_state(timeline)
    return steady.batch_interval + plan.host.step_seconds if steady else timeline.makespan


def collective_seconds(plan: Plan, programs: Sequence[Program]) -> float:
    """The seconds of the collectives of the rank that spends most on them, one after the other."""
    seconds = _collectives(plan)
    return max(
        sum(seconds.get((each.op, each.stage, each.bucket), 0.0) for each in program.instructions)
        for program in programs
    )


def _collectives(plan: Plan) -> dict[tuple[Op, int, int], float]:
    seconds: dict[tuple[Op, int, int], float] = {
        (Op.GATHER_ROWS, stage.index, -1): stage.tail.gather_seconds for stage in plan.stages if stage.tail
    }
    for number, bucket in enumerate(plan.sync_spec.buckets):
        for reduce in (Op.REDUCE_GRAD, Op.STORE):
            seconds[reduce, bucket.stage, number] = bucket.reduce_seconds
        for gather in (Op.UNSHARD, Op.LOAD):
            seconds[gather, bucket.stage, number] = bucket.unshard_seconds
    return seconds
