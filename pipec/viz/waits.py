"""Why a compute begins when it does: what its rank waited for, and the chain that makes the step last."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipec.ir import Link, Phase
from pipec.simulate import Event, Timeline

_NEGLIGIBLE = 1e-6
"""Share of the makespan below which a rank is not said to have waited: times are sums of floats."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What came right before an event. Indices count ``timeline.events``; None stands for nothing.

    ``previous`` is the compute of the same rank before it, ``idle`` the time the rank computed nothing in
    between, and ``message`` the one that ended it. Messages are never idle: they leave when they can.
    """

    previous: int | None = None
    idle: float = 0.0
    message: int | None = None

    @property
    def cause(self) -> int | None:
        """The event without which this one could have begun earlier."""
        return self.previous if self.message is None else self.message


def waits(timeline: Timeline) -> tuple[Wait, ...]:
    """What came right before each event, in the order of the events.

    A rank waits for the message that arrived last of those it reads. If they had all arrived before the
    rank was free, or it reads none, idle time is the rank's own, as that between recorded computes is.
    A recorded message lasts until it is read, so any is taken to arrive as fast as the fastest of its link.
    """
    inputs = _messages_by_reader(timeline)
    arrivals = _arrivals(timeline)
    least = _NEGLIGIBLE * timeline.makespan
    previous: dict[int, int] = {}
    found = []
    for index, event in enumerate(timeline.events):
        before = previous.get(event.rank)
        if event.is_compute:
            free = 0.0 if before is None else timeline.events[before].end
            last = max(_inputs(event, inputs), key=arrivals.__getitem__, default=None)
            late = last is not None and arrivals[last] > free + least
            idle = event.start - free
            found.append(Wait(before, idle, last if late else None) if idle > least else Wait(before))
            previous[event.rank] = index
        else:
            found.append(Wait(before))
    return tuple(found)


def critical_path(timeline: Timeline, found: Sequence[Wait]) -> tuple[int, ...]:
    """The events, first to last, each of which kept the next from beginning; the last one ends the step.

    ``found`` are the ``waits`` of the timeline.
    """
    events = timeline.events
    at = max(range(len(events)), key=lambda k: (events[k].end, events[k].is_compute), default=None)
    path: list[int] = []
    while at is not None:
        path.append(at)
        at = found[at].cause
    return tuple(reversed(path))


def readers(timeline: Timeline) -> dict[int, int]:
    """The compute that reads each message first, both as indices; what is read after the step is absent."""
    inputs = _messages_by_reader(timeline)
    first: dict[int, int] = {}
    for index, event in enumerate(timeline.events):
        for message in _inputs(event, inputs) if event.is_compute else ():
            first.setdefault(message, index)
    return first


_Reader = tuple[int, int, Phase | None, int]
"""Rank, stage, phase and microbatch of a compute; -1 stands for every microbatch."""


def _messages_by_reader(timeline: Timeline) -> dict[_Reader, list[int]]:
    inputs: dict[_Reader, list[int]] = defaultdict(list)
    for index, event in enumerate(timeline.events):
        sent, link = event.instruction, event.instruction.link
        if link and not event.is_compute:
            for phase in link.payload.readers:
                inputs[sent.peer, link.target, phase, sent.microbatch].append(index)
    return inputs


def _inputs(event: Event, inputs: dict[_Reader, list[int]]) -> Iterable[int]:
    stage, phase = event.instruction.stage, event.instruction.op.phase
    for microbatch in (event.instruction.microbatch, -1):
        yield from inputs.get((event.rank, stage, phase, microbatch), ())


def _arrivals(timeline: Timeline) -> dict[int, float]:
    """When each message, by its index, could be read."""
    messages = [(index, event) for index, event in enumerate(timeline.events) if not event.is_compute]
    fastest: dict[tuple[Link | None, int], float] = {}
    for _, event in messages:
        way = event.instruction.link, event.instruction.peer
        fastest[way] = min(event.end - event.start, fastest.get(way, math.inf))
    return {
        index: event.start + fastest[event.instruction.link, event.instruction.peer]
        for index, event in messages
    }
