"""What else was tried for a step, as data: what it would have taken, and why it was refused."""

from collections.abc import Sequence
from dataclasses import replace

from pipec.compiler.staged import Trial
from pipec.ir import Alternative
from pipec.ir.text import format_bytes


def alternative(trial: Trial) -> Alternative:
    """A trial as data. At this point it is refused only if it does not fit."""
    excess = max(trial.excess)
    return Alternative(
        schedule=trial.schedule.name,
        num_stages=trial.schedule.num_stages,
        replicas=max(map(len, trial.schedule.placement)),
        num_microbatches=trial.schedule.num_microbatches,
        seconds=trial.seconds,
        peak_bytes=trial.peak_bytes,
        refused=f"needs {format_bytes(excess)} more than a device has" if excess else "",
    )


def refused(tried: Sequence[Alternative], chosen: Trial) -> tuple[Alternative, ...]:
    """What was not taken, fastest first: the best trial of each schedule and number of microbatches."""
    best: dict[object, Alternative] = {}
    for other in sorted(tried, key=lambda other: (bool(other.refused), other.seconds)):
        best.setdefault((other.replicas, other.schedule), other)
        best.setdefault((other.replicas, other.num_microbatches), other)
    taken = alternative(chosen)
    others = [other for other in dict.fromkeys(best.values()) if _way(other) != _way(taken)]
    return tuple(sorted((_explained(other, taken) for other in others), key=lambda other: other.seconds))


def _way(other: Alternative) -> tuple[str, int, int]:
    return other.schedule, other.num_microbatches, other.replicas


def _explained(other: Alternative, taken: Alternative) -> Alternative:
    if other.refused:
        return other
    slower = other.seconds / taken.seconds - 1
    if slower >= 0.0005:
        return replace(other, refused=f"{slower:.1%} slower")
    if other.replicas != taken.replicas:
        return replace(other, refused=f"{-slower:.1%} faster, with replicas={other.replicas}")
    return replace(other, refused="about as fast, with more and smaller microbatches")
