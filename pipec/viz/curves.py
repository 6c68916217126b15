"""How much a rank holds over time, as steps."""

from collections.abc import Iterable, Sequence

from pipec.ir import Op
from pipec.simulate import Event, Timeline

Curve = Sequence[tuple[float, float]]
"""Times, ascending, each with the amount held from then on."""


def in_flight(timeline: Timeline) -> tuple[Curve, ...]:
    """For each rank the pairs of stage and microbatch it holds: from their forward to their last compute."""
    lanes: list[list[Event]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.computes:
        lanes[event.rank].append(event)
    return tuple(map(_steps, lanes))


def _steps(computes: Sequence[Event]) -> Curve:
    last = {(each.instruction.stage, each.instruction.microbatch): each for each in computes}
    changes = []
    for event in computes:
        if event.instruction.op is Op.FORWARD:
            changes.append((event.start, 1))
        if last[event.instruction.stage, event.instruction.microbatch] is event:
            changes.append((event.end, -1))
    return _running_totals(changes)


def _running_totals(changes: Iterable[tuple[float, int]]) -> Curve:
    """One step for each time: what ends as something else begins makes no notch."""
    totals: dict[float, float] = {0.0: 0}
    held = 0
    for time, change in changes:
        held += change
        totals[time] = held
    return tuple(totals.items())
