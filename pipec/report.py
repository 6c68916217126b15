"""What a person reads: a plan as a table of its stages, the timeline it predicts, a profile."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from io import StringIO
from time import perf_counter

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipec.attribution import Curve, Held, critical_path, memory_over_time, waits
from pipec.cost.profile import Profile
from pipec.ir import Payload, Phase, Plan, Program, Schedule, Stage
from pipec.lower import chain_links, lower
from pipec.memory import rank_bytes
from pipec.schedules import Workload
from pipec.simulate import Costs, simulate
from pipec.text import format_bytes, format_seconds, value_bytes
from pipec.timeline import Timeline
from pipec.verify import verify_programs

WIDTH = 240
"""Wide enough that no row is folded: a terminal folds it as it likes."""


class ReadablePlan(Plan):
    """A plan that prints as a table, with what the programs made from it predict."""

    __slots__ = ("_programs",)
    _programs: Sequence[Program]

    def __str__(self) -> str:
        return plan_table(self, self._programs)


def readable(plan: Plan, programs: Sequence[Program]) -> ReadablePlan:
    shown = ReadablePlan(**{field.name: getattr(plan, field.name) for field in fields(plan)})
    object.__setattr__(shown, "_programs", programs)
    return shown


def simulate_plan(plan: Plan, programs: Sequence[Program]) -> Timeline:
    """The programs played against the plan's costs."""
    compute = {(s.index, phase): time for s in plan.stages for phase, time in s.cost.seconds.items()}
    return simulate(programs, Costs(compute, dict(zip(plan.links, plan.link_seconds, strict=True))))


def simulate_schedule(schedule: Schedule, work: Workload) -> tuple[Timeline, float]:
    """A schedule of a plain chain of stages, and how many seconds it took to lower and verify it.

    Raises:
        VerifyError: the schedule is broken.
    """
    links = chain_links(schedule.num_stages)
    begun = perf_counter()
    programs = lower(schedule, links)
    verify_programs(programs, schedule.placement, links, schedule.num_microbatches)
    seconds = perf_counter() - begun
    return simulate(programs, work.costs(schedule, links)), seconds


def saved_bytes_over_time(plan: Plan, timeline: Timeline) -> tuple[Curve, ...]:
    """What the microbatches in flight on each rank hold: all of it until their last backward has ended."""
    held = {stage.index: Held(stage.cost.saved_bytes, stage.cost.saved_bytes) for stage in plan.stages}
    return memory_over_time(timeline, held)


def predicted(plan: Plan, programs: Sequence[Program]) -> dict[str, object]:
    """What the plan's costs say about a step: seconds, the bubble's share, peak bytes of each rank."""
    timeline = simulate_plan(plan, programs)
    return {
        "makespan": timeline.makespan,
        "bubble_rate": timeline.bubble_rate,
        "peak_bytes": [need.total for need in rank_bytes(plan, programs)],
    }


def plan_table(plan: Plan, programs: Sequence[Program]) -> str:
    """One row per stage, and under it what bounds the step."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "stage",
        "rank",
        "operators",
        "parameters",
        "forward",
        "backward",
        "sends",
        "saves",
        "modules",
    ):
        table.add_column(heading, justify="left" if heading == "modules" else "right", no_wrap=True)
    for stage in plan.stages:
        table.add_row(*_row(plan, stage))
    parts = [[_headline(plan)], _lines(table), _predictions(plan, programs), _alternatives(plan)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def profile_table(profile: Profile, most: int = 12) -> str:
    """The operators that take longest, and the sum of all."""
    forward, backward = (sum(op.seconds(phase) for op in profile.operators) for phase in _FUSED)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("operator", no_wrap=True)
    table.add_column("module", no_wrap=True)
    for heading in ("forward", "backward", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    slowest = sorted(profile.operators, key=lambda op: sum(map(op.seconds, _FUSED)), reverse=True)
    for op in slowest[:most]:
        seconds = [op.seconds(phase) for phase in _FUSED]
        share = sum(seconds) / (forward + backward)
        table.add_row(op.name, op.module, *map(format_seconds, seconds), f"{share:.1%}")
    headline = (
        f"{len(profile.operators)} operators on {profile.device}, microbatches of {profile.microbatch_size}: "
        f"forward {format_seconds(forward)}, backward {format_seconds(backward)}"
    )
    return "\n".join([headline, "", *_lines(table)])


_FUSED = (Phase.FORWARD, Phase.BACKWARD)


def _lines(table: Table) -> list[str]:
    out = StringIO()
    Console(file=out, width=WIDTH, color_system=None).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


def _headline(plan: Plan) -> str:
    return (
        f"{len(plan.stages)} stages on {plan.num_ranks} ranks, {plan.schedule}, "
        f"{plan.num_microbatches} microbatches of {plan.microbatch_size}"
    )


def _row(plan: Plan, stage: Stage) -> list[str]:
    seconds = stage.cost.seconds
    backward = sum(time for phase, time in seconds.items() if phase is not Phase.FORWARD)
    return [
        str(stage.index),
        str(plan.placement[stage.index]),
        f"{stage.first_operator}-{stage.last_operator}",
        format_bytes(stage.cost.parameter_bytes),
        format_seconds(seconds.get(Phase.FORWARD, 0.0)),
        format_seconds(backward),
        format_bytes(sent_bytes(plan, stage.index)),
        format_bytes(stage.cost.saved_bytes) + ("*" if stage.recompute else ""),
        _span(stage),
    ]


def _span(stage: Stage) -> str:
    return " to ".join(dict.fromkeys([*stage.modules[:1], *stage.modules[-1:]]))


def sent_bytes(plan: Plan, stage: int) -> int:
    """Bytes a stage sends for one microbatch, both ways."""
    return sum(
        value_bytes(value, plan.microbatch_size)
        for link in plan.links
        if link.source == stage and link.payload.per_microbatch
        for value in link.values
    )


def _predictions(plan: Plan, programs: Sequence[Program]) -> list[str]:
    timeline = simulate_plan(plan, programs)
    needs = rank_bytes(plan, programs)
    peaks = ", ".join(format_bytes(need.total) for need in needs)
    lines = [
        f"step {format_seconds(timeline.makespan)}, bubble {timeline.bubble_rate:.1%}",
        f"bounded by {_bounds(timeline)}",
        f"peak memory by rank, without optimizer state: {peaks}",
    ]
    if any(stage.recompute for stage in plan.stages):
        lines.append("* keeps what it received and computes the rest again")
    if tied := [v.name for link in plan.links if link.payload is Payload.WEIGHT for v in link.values]:
        lines.append(f"tied across stages: {', '.join(tied)}")
    return lines


def _bounds(timeline: Timeline) -> str:
    """What most of the critical path consists of, which has no gaps but those of messages."""
    seconds: dict[str, float] = defaultdict(float)
    for index in critical_path(timeline, waits(timeline)):
        event = timeline.events[index]
        stage = f"stage {event.instruction.stage}"
        seconds[stage if event.is_compute else "messages"] += event.end - event.start
    longest = sorted(((time / timeline.makespan, what) for what, time in seconds.items()), reverse=True)
    return ", ".join(f"{what} {share:.0%}" for share, what in longest[:3])


def _alternatives(plan: Plan) -> list[str]:
    if not plan.alternatives:
        return []
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("instead", no_wrap=True)
    for heading in ("microbatches", "stages", "replicas", "step", "peak memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("refused", no_wrap=True)
    for each in plan.alternatives:
        counts = map(str, (each.num_microbatches, each.num_stages, each.replicas))
        step, peak = format_seconds(each.seconds), format_bytes(each.peak_bytes)
        table.add_row(each.schedule, *counts, step, peak, each.refused)
    return _lines(table)
