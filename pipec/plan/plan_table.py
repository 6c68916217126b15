"""A plan as a table: its stages, what bounds the step, and the alternatives."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from pipec.ir import InputLeaf, Op, Payload, Phase, Plan, Program, RankMemory, Stage, Tail
from pipec.ir.text_format import (
    format_bytes,
    format_replicas,
    format_seconds,
    format_type,
    value_bytes,
)
from pipec.plan.predictions import plan_memory, simulate_plan
from pipec.plan.torch_schedule import module_fqns, orders_csv
from pipec.timeline.attribution import attribute_waits, critical_path, critical_path_times
from pipec.timeline.events import Timeline
from pipec.timeline.steady_state import steady_state


@dataclass(frozen=True, repr=False)
class PrintablePlan(Plan):
    """A plan that prints as a table, with what its ``programs`` predict."""

    programs: Sequence[Program] = field(default=(), repr=False, compare=False)

    @classmethod
    def of(cls, plan: Plan, programs: Sequence[Program]) -> "PrintablePlan":
        return cls(**{each.name: getattr(plan, each.name) for each in fields(plan)}, programs=programs)

    def __str__(self) -> str:
        return plan_table(self, self.programs)

    def __repr__(self) -> str:
        return str(self)

    def to_csv(self) -> str:
        """The compute orders as a CSV with a row for each rank, which torch's pipelining and torchtitan load.

        With replicas they are the orders of one pipeline. ``pipec.compile(..., schedule="order.csv")`` reads
        such a file.

        Raises:
            PlanError: torch's pipelining cannot run the plan: it is asynchronous, a part of its loss needs
                the rows of all microbatches, the script computes the loss, or replicas are unequal.
        """
        return orders_csv(self, self.programs)

    def module_fqns(self) -> list[list[str]]:
        """The names of the modules of each stage, as torchtitan's ``module_fqns_per_model_part``.

        Raises:
            PlanError: a cut is inside of a module, which the error names with the source line, or stages
                share a parameter.
        """
        return module_fqns(self)


def plan_table(plan: Plan, programs: Sequence[Program]) -> str:
    """One row per stage, and under it what bounds the step."""
    headings = ["stage", "rank", "operators", "weights", "forward", "backward", "sends", "saves", "modules"]
    microbatches = f"{plan.num_microbatches} microbatches of {plan.microbatch_size}"
    if plan.has_given_microbatches:
        microbatches = f"{plan.num_microbatches} given microbatches"
    parts = [
        [f"{len(plan.stages)} stages on {plan.num_ranks} ranks, {plan.schedule}, {microbatches}"],
        table_lines(headings, (_row(plan, stage) for stage in plan.stages), left=["modules"]),
        _predictions(plan, programs) + _inputs(plan),
        _sharding_table(plan),
        _alternatives(plan),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def table_lines(
    headings: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()
) -> list[str]:
    """A table as lines of text; the columns whose headings are in ``left`` are aligned to the left."""
    columns = [[*cells] for cells in zip(headings, *rows, strict=True)]
    for column in columns:
        align = str.ljust if column[0] in left else str.rjust
        width = max(map(len, column))
        column[:] = [align(cell, width) for cell in column]
    first, *others = ("   ".join(cells) for cells in zip(*columns, strict=True))
    return [f" {line}".rstrip() for line in (first, "─" * len(first), *others)]


def _row(plan: Plan, stage: Stage) -> list[str]:
    seconds = stage.cost.seconds
    backward = sum(time for phase, time in seconds.items() if phase is not Phase.FORWARD)
    return [
        str(stage.index),
        _ranges(plan.placement[stage.index]),
        f"{stage.first_operator}-{stage.last_operator}",
        format_bytes(stage.cost.memory.weights + _loaded_bytes(plan, stage.index)),
        format_seconds(seconds.get(Phase.FORWARD, 0.0)),
        format_seconds(backward),
        format_bytes(sent_bytes(plan, stage.index)),
        format_bytes(stage.cost.memory.saved) + ("*" if stage.has_recompute else ""),
        " to ".join(dict.fromkeys([*stage.modules[:1], *stage.modules[-1:]])),
    ]


def _loaded_bytes(plan: Plan, stage: int) -> int:
    """The bytes of a stage's weights that are in host memory."""
    own = (bucket for bucket in plan.sync_spec.buckets if bucket.stage == stage)
    loaded = (bucket for bucket in own if plan.sync_spec.is_in_host_memory(bucket))
    return sum(value_bytes(value, {}) for bucket in loaded for value in bucket.parameters)


def sent_bytes(plan: Plan, stage: int, per_microbatch: bool = True) -> int:
    """Bytes a stage sends to other ranks both ways, for one microbatch; or what it sends once a step."""
    return sum(
        value_bytes(value, plan.sizes)
        for link in plan.links
        if link.source == stage and link.payload.per_microbatch is per_microbatch
        if link.target < 0 or plan.placement[link.target] != plan.placement[stage]
        for value in link.values
    )


def bytes_of_step(plan: Plan) -> int:
    """Bytes that all ranks send in a step, without collectives."""
    return sum(
        sent_bytes(plan, stage) * plan.num_microbatches
        + sent_bytes(plan, stage, per_microbatch=False) * len(ranks)
        for stage, ranks in enumerate(plan.placement)
    )


def _predictions(plan: Plan, programs: Sequence[Program]) -> list[str]:
    timeline = simulate_plan(plan, programs)
    needs = plan_memory(plan, programs)
    lines = [
        _pace(timeline),
        f"bounded by {_bounds(timeline)}",
        _peaks(plan, needs),
    ]
    if plan.cost_source:
        lines.append(f"seconds come from {plan.cost_source}")
    lines += [f"assumed: {each}" for each in plan.assumptions]
    lines += [plan.checked] if plan.checked else []
    if any(need.host_bytes for need in needs):
        lines.append(f"host memory by rank: {', '.join(format_bytes(need.host_bytes) for need in needs)}")
    if any(stage.has_recompute for stage in plan.stages):
        memories = (stage.cost.memory for stage in plan.stages)
        without = ", ".join(format_bytes(memory.saved + memory.unsaved) for memory in memories)
        lines.append(f"* computes the rest again; saved without that: {without}")
    lines += [_tail_line(plan, stage.tail) for stage in plan.stages if stage.tail]
    if plan.sync_spec.updates and plan.sync_spec.shards_gradients and plan.sync_spec.buckets:
        often = (
            "once a step: whole sums fit into memory" if plan.sync_spec.reduces_once else "after each round"
        )
        lines.append(f"sums of gradients are reduced {often}")
    if tied := [v.name for link in plan.links if link.payload is Payload.WEIGHT for v in link.values]:
        lines.append(f"tied across stages: {', '.join(tied)}")
    return lines


def _tail_line(plan: Plan, tail: Tail) -> str:
    """What runs once a step, and the order that it demands."""
    sizes = {**plan.sizes, "b": plan.microbatch_size * plan.num_microbatches}
    read = format_bytes(sum(value_bytes(value, sizes) for value in tail.inputs))
    order = "between all forwards and all backwards" if tail.gradients else "behind all forwards"
    what = f"{tail.location} needs all rows, {read}"
    return f"tail: {what}: runs once a step, {order}, in {format_seconds(tail.seconds)}"


def _ranges(ranks: Sequence[int]) -> str:
    """``0, 1, 4``; of more than ``_MOST_NUMBERS``, ``0 to 9992 in steps of 8`` if they are so."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) <= _MOST_NUMBERS or len(steps) > 1:
        return ", ".join(map(str, ranks))
    apart = f" in steps of {step}" if (step := steps.pop()) > 1 else ""
    return f"{ranks[0]} to {ranks[-1]}{apart}"


def _peaks(plan: Plan, needs: Sequence[RankMemory]) -> str:
    """The peak memory of each rank, or, if those are too many to list, the highest of each stage's ranks."""
    state = sum(stage.cost.memory.state for stage in plan.stages)
    counted = "with optimizer state" if state else "without optimizer state"
    if len(needs) <= _MOST_NUMBERS:
        peaks = ", ".join(format_bytes(need.peak_bytes) for need in needs)
        return f"peak memory by rank, {counted}: {peaks}"
    highest = (max(needs[rank].peak_bytes for rank in ranks) for ranks in plan.placement)
    return f"peak memory by stage, {counted}: {', '.join(map(format_bytes, highest))}"


_MOST_NUMBERS = 64
"""Ranks that are listed one by one."""


def _pace(timeline: Timeline) -> str:
    if steady := steady_state(timeline):
        return f"a mini-batch every {format_seconds(steady.batch_interval)}, bubble {steady.bubble_rate:.1%}"
    return f"step {format_seconds(timeline.makespan)}, bubble {timeline.bubble_rate:.1%}"


def _inputs(plan: Plan) -> list[str]:
    rows = {
        kind: [_input(plan, entry) for entry in plan.inputs if entry.batched is split]
        for kind, split in (("split into microbatches", True), ("whole in every microbatch", False))
    }
    lines = [f"{kind}: {', '.join(listed)}" for kind, listed in rows.items() if listed]
    if not plan.has_given_microbatches:
        return lines
    planned = ", ".join(f"{name} = {size}" for name, size in plan.planned_sizes.items())
    lines = [line.replace("whole in every microbatch", "given in every microbatch") for line in lines]
    return [*lines, f"planned for a microbatch of {planned}; others may have any sizes"] if planned else lines


def _input(plan: Plan, entry: InputLeaf) -> str:
    """An input as the user passes it, and by which dimension it is split if that is not the first."""
    axis = plan.batch_axes[entry.position]
    where = "" if axis is None or axis.is_leading else f" by dimension {axis.dim}"
    return f"{entry.path} {format_type(plan.user_value(entry))}{where}"


def _bounds(timeline: Timeline) -> str:
    """The main components of the critical path. It has no gaps: messages count as part of it."""
    seconds: dict[str, float] = defaultdict(float)
    path = critical_path(timeline, attribute_waits(timeline))
    for index, time in zip(path, critical_path_times(timeline, path), strict=True):
        event = timeline.events[index]
        copies = "host memory" if event.instruction.op is Op.HOST_UPDATE else "host link"
        others = "collectives" if event.is_collective else copies if event.is_copy else "messages"
        what = f"stage {event.instruction.stage}" if event.is_blocking else others
        seconds[what] += time
    longest = sorted(((time / timeline.makespan, what) for what, time in seconds.items()), reverse=True)
    return ", ".join(f"{what} {share:.0%}" for share, what in longest[:3])


def _sharding_table(plan: Plan) -> list[str]:
    if not plan.sharding_costs:
        return []
    rows = (
        (
            (each.shard or "nothing") + (" (taken)" if each.shard is plan.sync_spec.shard else ""),
            format_bytes(each.peak_bytes),
            format_seconds(each.collective_seconds),
            format_seconds(each.seconds),
        )
        for each in plan.sharding_costs
    )
    return table_lines(["shard", "peak memory", "collectives", "step"], rows, left=["shard"])


def _alternatives(plan: Plan) -> list[str]:
    if not plan.alternatives:
        return []
    headings = ["instead", "microbatches", "stages", "replicas", "step", "peak memory", "result"]
    rows = (
        (
            each.schedule,
            str(each.num_microbatches),
            str(each.num_stages),
            format_replicas(each.replicas),
            format_seconds(each.seconds),
            format_bytes(each.peak_bytes),
            each.rejection_reason,
        )
        for each in plan.alternatives
    )
    return table_lines(headings, rows, left=["instead", "result"])
