"""Why a step takes as long as it does: what ranks wait for, the critical path, and memory over time."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pipec.ir import Link, Phase
from pipec.simulate import Event, Timeline

Curve = Sequence[tuple[float, float]]
"""Times, ascending, each with the amount held from then on."""

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


def waiting_time(timeline: Timeline) -> dict[tuple[int, int], float]:
    """How long each rank waits for each other one, as ``{(rank, other): time}``."""
    total: dict[tuple[int, int], float] = defaultdict(float)
    for event, wait in zip(timeline.events, waits(timeline), strict=True):
        if wait.message is not None:
            total[event.rank, timeline.events[wait.message].rank] += wait.idle
    return dict(total)


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


@dataclass(frozen=True, slots=True)
class Held:
    """What a microbatch of a stage holds: ``backward`` from its forward to its input gradient or whole
    backward, ``weight`` from there to its weight gradient, in bytes or any other unit."""

    backward: float = 1.0
    weight: float = 1.0


def memory_over_time(timeline: Timeline, held: Mapping[int, Held] | None = None) -> tuple[Curve, ...]:
    """For each rank the steps of what its microbatches hold: ``(time, amount from then on)``, from time 0.

    ``held[stage]`` is what one microbatch holds, by default 1 until its last compute: that counts the
    pairs of stage and microbatch in flight. A forward holds from its start, a backward lets go at its end.
    """
    changes: list[list[tuple[float, float]]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.computes:
        one = (held or {}).get(event.instruction.stage, Held())
        changes[event.rank] += _changes(event, one)
    return tuple(map(_steps, changes))


def _changes(event: Event, held: Held) -> Iterator[tuple[float, float]]:
    match event.instruction.op.phase:
        case Phase.FORWARD:
            yield event.start, held.backward
        case Phase.BACKWARD:
            yield event.end, -held.backward
        case Phase.BACKWARD_INPUT:
            yield event.end, held.weight - held.backward
        case Phase.BACKWARD_WEIGHT:
            yield event.end, -held.weight


def _steps(changes: Sequence[tuple[float, float]]) -> Curve:
    """Running totals, one step for all changes at the same time."""
    ordered = sorted([(0.0, 0.0), *changes])
    totals = list(accumulate(change for _, change in ordered))
    times = [time for time, _ in ordered]
    last_of_time = [here != after for here, after in pairwise([*times, None])]
    return [(time, total) for time, total, last in zip(times, totals, last_of_time, strict=True) if last]
