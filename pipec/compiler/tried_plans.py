"""What is said of plans that were tried: why one was not chosen, and what the ranks need if none fits."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from pipec.compiler.staged_graph import EvaluatedPlan
from pipec.errors import InfeasibleError, InputError
from pipec.ir import Alternative, RankMemory, ShardingCost, ShardingLevel, stages_on
from pipec.ir.text_format import format_bytes, format_replicas
from pipec.plan.predictions import collective_seconds


def as_alternative(evaluated: EvaluatedPlan) -> Alternative:
    """An evaluated plan as data. Its rejection reason is set only if it does not fit into memory."""
    excess = max(evaluated.excess_bytes)
    return Alternative(
        schedule=evaluated.schedule.name,
        replicas=tuple(map(len, evaluated.schedule.placement)),
        num_microbatches=evaluated.plan.num_microbatches,
        seconds=evaluated.seconds,
        peak_bytes=evaluated.peak_bytes,
        rejection_reason=f"needs {format_bytes(excess)} more than a device has" if excess else "",
    )


def rejected_alternatives(tried: Sequence[Alternative], chosen: EvaluatedPlan) -> tuple[Alternative, ...]:
    """The rejected plans, fastest first: the best of each schedule and of each number of microbatches."""
    best: dict[object, Alternative] = {}
    for other in sorted(tried, key=lambda other: (bool(other.rejection_reason), other.seconds)):
        replicas = format_replicas(other.replicas)
        best.setdefault((replicas, other.schedule), other)
        best.setdefault((replicas, other.num_microbatches), other)
    taken = as_alternative(chosen)
    others = [other for other in dict.fromkeys(best.values()) if _identity(other) != _identity(taken)]
    return tuple(sorted((_with_reason(other, taken) for other in others), key=lambda other: other.seconds))


def sharding_costs(evaluated: EvaluatedPlan) -> tuple[ShardingCost, ...]:
    """The memory and time of a plan with each level of sharding.

    Empty unless the plan updates stages with replicas, and for asynchronous schedules.
    """
    sync_spec, staged = evaluated.plan.sync_spec, evaluated.staged
    if not (sync_spec.updates and sync_spec.buckets) or sync_spec.stream or sync_spec.weights_on_host:
        return ()
    levels = {}
    for shard in (None, *ShardingLevel):
        with suppress(InputError):  # a level that this plan cannot have
            level = replace(staged.options.sync_spec, shard=shard)
            levels[shard] = staged.evaluate(evaluated.schedule, evaluated.plan.microbatch_size, level)
    return tuple(
        ShardingCost(shard, each.peak_bytes, collective_seconds(each.plan, each.programs), each.seconds)
        for shard, each in levels.items()
    )


def _identity(other: Alternative) -> tuple[str, int, str]:
    return other.schedule, other.num_microbatches, format_replicas(other.replicas)


def _with_reason(other: Alternative, taken: Alternative) -> Alternative:
    """The alternative with the reason why ``taken`` is preferred to it."""
    if other.rejection_reason:
        return other
    slower = other.seconds / taken.seconds - 1
    if slower >= 0.0005:
        return replace(other, rejection_reason=f"{slower:.1%} slower")
    replicas = format_replicas(other.replicas)
    if replicas != format_replicas(taken.replicas):
        how = f"with replicas={replicas}" if replicas.isdigit() else "tried by replicas='auto'"
        return replace(other, rejection_reason=f"{-slower:.1%} faster, {how}")
    smaller = ", with more and smaller microbatches" * (other.num_microbatches > taken.num_microbatches)
    return replace(other, rejection_reason=f"about as fast{smaller}")


_STATIC = ("parameters", "buffers", "precomputed", "gradients", "optimizer", "versions")
_MESSAGES = ("received", "sent", "in_transit", "results")


def require_memory(evaluated: EvaluatedPlan, where: str = "") -> None:
    """Raise InfeasibleError if the plan that comes nearest to fitting lacks memory."""
    if not any(evaluated.excess_bytes):
        return
    options = evaluated.staged.options
    instead = "" if options.recompute == "auto" else ", recompute='auto'"
    instead += "" if options.may_offload or evaluated.is_asynchronous else ", offload='activations'"
    is_shared = any(len(ranks) > 1 for ranks in evaluated.plan.placement) or evaluated.is_asynchronous
    instead += "" if options.sync_spec.weights_on_host or is_shared else ", offload='weights'"
    if options.sync_spec.shard is ShardingLevel.PARAMETERS:
        instead += ", schedule='looped-bfs-v4', which gathers a quarter of a rank's layers at a time"
    needed = math.ceil(max(need.peak_bytes for need in evaluated.memory))
    lines = [
        "nothing that was tried fits into the memory of the devices; what comes nearest needs",
        *_needs(evaluated),
        f"This plan{where} needs memory_limit={needed} ({format_bytes(needed)}).",
        f"Use more devices, more microbatches of fewer rows{instead}, or a higher limit.",
    ]
    raise InfeasibleError("\n".join(lines))


def _needs(evaluated: EvaluatedPlan) -> Iterator[str]:
    """What each rank needs, and its limit."""
    for need in evaluated.memory:
        limit = evaluated.memory_limit(need.rank)
        stages = " and ".join(map(str, stages_on(evaluated.plan.placement, need.rank)))
        of_limit = f" of {format_bytes(limit)}" if limit < math.inf else ""
        excess = f", {format_bytes(need.peak_bytes - limit)} too many" if need.peak_bytes > limit else ""
        yield (
            f"  rank {need.rank}, stage {stages}: {_sum(need, _STATIC)} weights, gradients and state + "
            f"{_sum(need, ('saved', 'inputs'))} saved ({need.in_flight} in flight) + "
            f"{format_bytes(need.running)} transient + {_sum(need, _MESSAGES)} messages = "
            f"{format_bytes(need.peak_bytes)}{of_limit}{excess}"
        )


def _sum(need: RankMemory, kinds: Sequence[str]) -> str:
    return format_bytes(sum(need.bytes_by_category[kind] for kind in kinds))
