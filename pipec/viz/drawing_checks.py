"""Checks that several steps can be drawn on one axis."""

from collections.abc import Sequence

from pipec.errors import InputError
from pipec.viz.drawn_steps import DrawnStep

MOST_EVENTS = 500_000
"""Of more, a page has only the messages for which a rank waited, and a trace is refused."""


def check_trace(count: int) -> None:
    """Raise InputError for so many events that no viewer opens a trace of them."""
    if count > MOST_EVENTS:
        raise InputError(
            f"a trace of at least {count:,} events; viewers open some {MOST_EVENTS:,} at most: draw .html, "
            "which shows all of them, or a step of fewer microbatches or ranks"
        )


def check_steps(steps: Sequence[DrawnStep]) -> None:
    """Raise InputError unless the steps share a unit of time, and memory has a curve for each rank."""
    if not steps:
        raise InputError("no step is given; expected at least one")
    units = {step.name: step.timeline.unit for step in steps}
    if len(set(units.values())) > 1:
        shown = ", ".join(f"{name!r} in {unit}" for name, unit in units.items())
        raise InputError(f"timelines on one axis need one unit of time: {shown}; draw them apart")
    for step in steps:
        if step.memory and len(step.memory) != step.timeline.num_ranks:
            raise InputError(
                f"memory of {step.name!r} has {len(step.memory)} curves; expected one for each of its "
                f"{step.timeline.num_ranks} ranks"
            )
