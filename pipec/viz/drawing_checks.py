"""Checks that several timelines can be drawn on one axis."""

from collections.abc import Mapping, Sequence

from pipec.errors import InputError
from pipec.timeline.attribution import Curve
from pipec.timeline.events import Timeline

MOST_EVENTS = 500_000
"""Of more, a page is an overview, in which short computes are drawn together, and a trace is refused."""


def num_events(timelines: Mapping[str, Timeline]) -> int:
    """How many events the timelines have together."""
    return sum(len(timeline.events) for timeline in timelines.values())


def check_trace(count: int) -> None:
    """Raise InputError for so many events that no viewer opens a trace of them."""
    if count > MOST_EVENTS:
        raise InputError(
            f"a trace of at least {count:,} events; viewers open some {MOST_EVENTS:,} at most: draw .html or "
            ".svg, which show an overview, or a step of fewer microbatches or ranks"
        )


def check_timelines(timelines: Mapping[str, Timeline], memory: Mapping[str, Sequence[Curve]]) -> None:
    """Raise InputError unless the timelines share one unit and ``memory`` fits them.

    Each entry of ``memory`` belongs to a timeline of its name, and has a curve for each of its ranks.
    """
    if not timelines:
        raise InputError("no timeline is given; expected at least one, under the name it is shown with")
    units = {name: timeline.unit for name, timeline in timelines.items()}
    if len(set(units.values())) > 1:
        shown = ", ".join(f"{name!r} in {unit}" for name, unit in units.items())
        raise InputError(f"timelines on one axis need one unit of time: {shown}; draw them apart")
    for name, curves in memory.items():
        if name not in timelines:
            raise InputError(
                f"memory is given for {name!r}; expected one of the timelines: {', '.join(timelines)}"
            )
        if len(curves) != timelines[name].num_ranks:
            raise InputError(
                f"memory of {name!r} has {len(curves)} curves; expected one for each of its "
                f"{timelines[name].num_ranks} ranks"
            )
