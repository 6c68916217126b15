"""What a step might do otherwise, as data: what that would take, and why it was refused."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from pipec.compiler.staged import Trial
from pipec.errors import InputError
from pipec.ir import Alternative, Shard, ShardCost
from pipec.ir.text import format_bytes, format_replicas
from pipec.plan.predictions import collective_seconds


def alternative(trial: Trial) -> Alternative:
    """A trial as data. At this point it is refused only if it does not fit."""
    excess = max(trial.excess)
    return Alternative(
        schedule=trial.schedule.name,
        replicas=tuple(map(len, trial.schedule.placement)),
        num_microbatches=trial.plan.num_microbatches,
        seconds=trial.seconds,
        peak_bytes=trial.peak_bytes,
        refused=f"needs {format_bytes(excess)} more than a device has" if excess else "",
    )


def refused(tried: Sequence[Alternative], chosen: Trial) -> tuple[Alternative, ...]:
    """What was not taken, fastest first: the best trial of each schedule and number of microbatches."""
    best: dict[object, Alternative] = {}
    for other in sorted(tried, key=lambda other: (bool(other.refused), other.seconds)):
        replicas = format_replicas(other.replicas)
        best.setdefault((replicas, other.schedule), other)
        best.setdefault((replicas, other.num_microbatches), other)
    taken = alternative(chosen)
    others = [other for other in dict.fromkeys(best.values()) if _way(other) != _way(taken)]
    return tuple(sorted((_explained(other, taken) for other in others), key=lambda other: other.seconds))


def shard_costs(trial: Trial) -> tuple[ShardCost, ...]:
    """What a trial would take with each level of sharding, if its updates are of stages with replicas.

    Without a flush there is none.
    """
    ending = trial.plan.ending
    if not (ending.updates and ending.buckets) or ending.stream:
        return ()
    levels = {}
    for shard in (None, *Shard):
        with suppress(InputError):  # what cannot be sharded
            levels[shard] = trial.staged.sharded(trial, shard)
    return tuple(
        ShardCost(shard, each.peak_bytes, collective_seconds(each.plan, each.programs), each.seconds)
        for shard, each in levels.items()
    )


def _way(other: Alternative) -> tuple[str, int, str]:
    return other.schedule, other.num_microbatches, format_replicas(other.replicas)


def _explained(other: Alternative, taken: Alternative) -> Alternative:
    if other.refused:
        return other
    slower = other.seconds / taken.seconds - 1
    if slower >= 0.0005:
        return replace(other, refused=f"{slower:.1%} slower")
    replicas = format_replicas(other.replicas)
    if replicas != format_replicas(taken.replicas):
        how = f"with replicas={replicas}" if replicas.isdigit() else "tried by replicas='auto'"
        return replace(other, refused=f"{-slower:.1%} faster, {how}")
    smaller = ", with more and smaller microbatches" * (other.num_microbatches > taken.num_microbatches)
    return replace(other, refused=f"about as fast{smaller}")
