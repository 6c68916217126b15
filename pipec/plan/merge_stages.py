"""The plan of a step with neighbouring stages merged, on fewer ranks."""

from collections.abc import Sequence
from dataclasses import replace

from pipec.errors import PlanError
from pipec.ir import Link, Payload, Phase, Plan, Stage, StageCost
from pipec.ir.schedule import one_rank_per_stage


def merge_stages(plan: Plan, factor: int) -> Plan:
    """The plan on a ``factor``-th of its ranks: each ``factor`` stages in a row are one, on one rank.

    A merged stage takes the seconds of its parts, and the links between them are gone. Links that become
    one take at most the sum of their seconds; a value is then sent once. Only times are those of such a step:
    what a stage holds in memory is not worked out. For example, four stages by a factor of 2::

        before  0 -> 1 -> 2 -> 3
        merged   (0 1) -> (2 3)

    Raises PlanError if some ranks would be left over, or a stage has replicas or phases of several functions.
    """
    if plan.num_ranks % factor or len(plan.stages) % factor:
        raise PlanError(f"{len(plan.stages)} stages on {plan.num_ranks} ranks are not a multiple of {factor}")
    if any(len(ranks) > 1 for ranks in plan.placement) or any(stage.segments for stage in plan.stages):
        raise PlanError("stages with replicas, or with phases of several functions, cannot be merged")
    parts = [plan.stages[first : first + factor] for first in range(0, len(plan.stages), factor)]
    ranks = [{plan.placement[stage.index][0] // factor for stage in group} for group in parts]
    if any(len(each) > 1 for each in ranks):
        raise PlanError("neighbouring stages are not on neighbouring ranks")
    links = _merged_links(plan, factor)
    return replace(
        plan,
        placement=one_rank_per_stage(min(each) for each in ranks),
        stages=tuple(_merged(index, group) for index, group in enumerate(parts)),
        links=tuple(link for link, *_ in links),
        link_seconds=tuple(seconds for _, seconds, _ in links),
        link_sender_bytes=(0.0,) * len(links),
        link_saved_bytes=(0.0,) * len(links),
        link_reader_phases=tuple(phase for *_, phase in links),
    )


def _merged(index: int, parts: Sequence[Stage]) -> Stage:
    """One stage of several that follow each other."""
    seconds: dict[Phase, float] = {}
    for part in parts:
        for phase, time in part.cost.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + time
    return replace(
        parts[0],
        index=index,
        last_operator=parts[-1].last_operator,
        tail=next((part.tail for part in parts if part.tail), None),
        recompute=any(part.recompute for part in parts),
        offloaded=tuple(k for part in parts for k in part.offloaded),
        cost=StageCost(
            seconds,
            update_seconds=sum(part.cost.update_seconds for part in parts),
            copy_seconds=sum(part.cost.copy_seconds for part in parts),
        ),
    )


def _merged_links(plan: Plan, factor: int) -> Sequence[tuple[Link, float, Phase]]:
    """The links between merged stages, with their seconds and the last phases that read them."""
    found: dict[tuple[int, int, Payload], tuple[Link, float, Phase]] = {}
    for link, seconds, phase in zip(plan.links, plan.link_seconds, plan.link_reader_phases, strict=True):
        source, target = link.source // factor, -1 if link.target < 0 else link.target // factor
        if source == target:
            continue
        empty = Link(source, target, link.payload, ()), 0.0, phase
        merged, so_far, last = found.get((source, target, link.payload), empty)
        new = tuple(value for value in link.values if value not in merged.values)
        found[source, target, link.payload] = (
            replace(merged, values=merged.values + new),
            so_far + seconds * bool(new),
            max(last, phase, key=[*Phase].index),
        )
    return [*found.values()]
