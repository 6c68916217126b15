"""What a step might do otherwise, as data: what that would take, and why it was refused."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from pipec.compiler.staged_graph import EvaluatedPlan
from pipec.errors import InputError
from pipec.ir import Alternative, ShardingCost, ShardingLevel
from pipec.ir.text_format import format_bytes, format_replicas
from pipec.plan.predictions import collective_seconds


def as_alternative(evaluated: EvaluatedPlan) -> Alternative:
    """An evaluated plan as data. At this point it is refused only if it does not fit."""
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
    """What was not taken, fastest first: the best plan of each schedule and number of microbatches."""
    best: dict[object, Alternative] = {}
    for other in sorted(tried, key=lambda other: (bool(other.rejection_reason), other.seconds)):
        replicas = format_replicas(other.replicas)
        best.setdefault((replicas, other.schedule), other)
        best.setdefault((replicas, other.num_microbatches), other)
    taken = as_alternative(chosen)
    others = [other for other in dict.fromkeys(best.values()) if _way(other) != _way(taken)]
    return tuple(sorted((_explained(other, taken) for other in others), key=lambda other: other.seconds))


def sharding_costs(evaluated: EvaluatedPlan) -> tuple[ShardingCost, ...]:
    """What an evaluated plan takes with each level of sharding, if it updates stages with replicas.

    Without a flush there is none.
    """
    sync_spec, staged = evaluated.plan.sync_spec, evaluated.staged
    if not (sync_spec.updates and sync_spec.buckets) or sync_spec.stream:
        return ()
    levels = {}
    for shard in (None, *ShardingLevel):
        with suppress(InputError):  # what cannot be sharded
            level = replace(staged.options.sync_spec, shard=shard)
            levels[shard] = staged.evaluate(evaluated.schedule, evaluated.plan.microbatch_size, level)
    return tuple(
        ShardingCost(shard, each.peak_bytes, collective_seconds(each.plan, each.programs), each.seconds)
        for shard, each in levels.items()
    )


def _way(other: Alternative) -> tuple[str, int, str]:
    return other.schedule, other.num_microbatches, format_replicas(other.replicas)


def _explained(other: Alternative, taken: Alternative) -> Alternative:
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
