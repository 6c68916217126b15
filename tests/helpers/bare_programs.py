"""Programs of schedules whose stages have no code: lowered and verified from what a test says of them."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from pipec.ir import (
    NO_SYNC,
    Link,
    ModelCollectives,
    Phase,
    Placement,
    Plan,
    Program,
    Schedule,
    SegmentCounts,
    SyncSpec,
    one_rank_per_stage,
)
from pipec.programs import lower as lowering
from pipec.programs import verify as verification
from pipec.programs.lower import chain_links
from pipec.schedules import Workload
from pipec.timeline.simulate import SimulationCosts


def plan_of(
    schedule: Schedule,
    links: Sequence[Link],
    recompute: Collection[int] = (),
    sync_spec: SyncSpec = NO_SYNC,
    segments: SegmentCounts | None = None,
    model_collectives: ModelCollectives | None = None,
    offload: Collection[int] = (),
) -> Plan:
    """A plan without costs. ``recompute`` and ``offload`` are the stages that do so."""
    plan = lowering.bare_plan(schedule, links, sync_spec)
    counts, collectives = segments or {}, model_collectives or {}
    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                recompute=stage.index in recompute,
                offloaded=(0,) * (stage.index in offload),
                segments={
                    phase: (1 / count,) * count
                    for (index, phase), count in counts.items()
                    if index == stage.index
                },
                model_collectives=tuple(collectives.get(stage.index, ())),
            )
            for stage in plan.stages
        ),
    )


def lower(schedule: Schedule, links: Sequence[Link], *args: object, **options: object) -> tuple[Program, ...]:
    """The programs of ``plan_of`` these."""
    return lowering.lower(schedule, plan_of(schedule, links, *args, **options))  # type: ignore[arg-type]


def verify_programs(
    programs: Sequence[Program],
    placement: Placement,
    links: Sequence[Link],
    num_microbatches: int,
    **options: object,
) -> None:
    """Verify ``programs`` against ``plan_of`` these."""
    plan = plan_of(Schedule("test", num_microbatches, placement, ()), links, **options)  # type: ignore[arg-type]
    verification.verify_step(plan, programs)


def verified(schedule: Schedule) -> tuple[Program, ...]:
    """The programs of a schedule on a chain of stages."""
    links = chain_links(schedule.num_stages)
    programs = lower(schedule, links)
    verify_programs(programs, schedule.placement, links, schedule.num_microbatches)
    return programs


def uniform_costs(
    num_stages: int, *, links: Iterable[Link] = (), message: float = 0.0, unit: str = "units", **times: float
) -> SimulationCosts:
    """The same for every stage, also a forward that is computed again, and for every one of ``links``."""
    alone = Schedule("uniform", 1, one_rank_per_stage(range(num_stages)), ())
    costs = Workload.uniform(num_stages, **times).costs(alone, ())
    again = {(stage, Phase.RECOMPUTE): costs.compute[stage, Phase.FORWARD] for stage in range(num_stages)}
    compute, messages = {**costs.compute, **again}, dict.fromkeys(links, message)
    return replace(costs, compute=compute, messages=messages, unit=unit)
