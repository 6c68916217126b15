"""What else was tried for a step, as data: what it would have taken, and why it was refused."""

from collections.abc import Sequence
from dataclasses import replace

from pipec.compiler.staged import Trial
from pipec.hardware.devices import LinkModel
from pipec.ir import Alternative, stages_on
from pipec.ir.text import format_bytes


def alternative(trial: Trial) -> Alternative:
    """A trial as data. At this point it is refused only if it does not fit."""
    excess = max(trial.excess)
    return Alternative(
        schedule=trial.schedule.name,
        num_stages=trial.schedule.num_stages,
        replicas=1,
        num_microbatches=trial.schedule.num_microbatches,
        seconds=trial.seconds,
        peak_bytes=trial.peak_bytes,
        refused=f"needs {format_bytes(excess)} more than a device has" if excess else "",
    )


def replicated(trial: Trial, replicas: int, link: LinkModel) -> Alternative:
    """A trial as one of several pipelines whose ranks then sum their gradients in a ring.

    A ring takes 2 (r - 1) steps, each of which moves an r-th of the gradients.
    """
    stages = [stage.cost.memory for stage in trial.plan.stages]
    gradients = max(
        sum(stages[stage].gradients for stage in stages_on(trial.plan.placement, rank))
        for rank in range(trial.plan.num_ranks)
    )
    ring = 2 * (replicas - 1) * link.seconds(gradients / replicas)
    one = alternative(trial)
    why = one.refused or "a stage cannot have replicas yet"
    return replace(one, replicas=replicas, seconds=one.seconds + ring, refused=why)


def refused(tried: Sequence[Alternative], chosen: Trial) -> tuple[Alternative, ...]:
    """What was not taken, fastest first: the best trial of each schedule and number of microbatches."""
    best: dict[object, Alternative] = {}
    for other in sorted(tried, key=lambda other: (bool(other.refused), other.seconds)):
        best.setdefault((other.replicas, other.schedule), other)
        best.setdefault((other.replicas, other.num_microbatches), other)
    taken = _way(alternative(chosen))
    others = [other for other in dict.fromkeys(best.values()) if _way(other) != taken]
    explained = [_explained(other, chosen.seconds) for other in others]
    return tuple(sorted(explained, key=lambda other: other.seconds))


def _way(other: Alternative) -> tuple[str, int, int]:
    return other.schedule, other.num_microbatches, other.replicas


def _explained(other: Alternative, taken_seconds: float) -> Alternative:
    if other.refused:
        return other
    slower = other.seconds / taken_seconds - 1
    if slower >= 0.0005:
        return replace(other, refused=f"{slower:.1%} slower")
    return replace(other, refused="about as fast, with more and smaller microbatches")
