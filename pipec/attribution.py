"""Why a step takes as long as it does: for whom each rank waits, the critical path, and memory over time."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from pipec.ir import Phase
from pipec.simulate import Event, Timeline

_TIE = 1e-9
"""Times closer than this share of the makespan are equal: sums of the same costs in another order."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank idles from ``start`` until ``compute`` begins, because ``message`` has not arrived earlier."""

    compute: Event
    start: float
    message: Event

    @property
    def seconds(self) -> float:
        return self.compute.start - self.start

    @property
    def seconds_on_the_way(self) -> float:
        """The part in which the message was on its way; until then its sender had not made it."""
        return min(self.seconds, self.message.end - self.message.start)


def waits(timeline: Timeline) -> list[Wait]:
    """Every pause of every rank before and between its computes, rank by rank in the order of time."""
    causes = _Causes(timeline)
    found = []
    for computes in causes.by_rank.values():
        ends = [0.0, *(event.end for event in computes)]
        for end, compute in zip(ends, computes, strict=False):
            message = causes.latest_message(compute)
            if message and compute.start - end > causes.tie:
                found.append(Wait(compute, end, message))
    return found


def waiting_time(timeline: Timeline) -> dict[tuple[int, int], float]:
    """How long each rank waits for each other one, as ``{(rank, other): time}``."""
    total: dict[tuple[int, int], float] = defaultdict(float)
    for wait in waits(timeline):
        total[wait.compute.rank, wait.message.rank] += wait.seconds
    return dict(total)


def critical_path(timeline: Timeline) -> list[Event]:
    """Computes and messages from time 0 to the makespan, each of which begins when the one before it ends.

    To shorten the step, one of them must get shorter or move. Where several paths are as long, the one that
    stays on its rank.
    """
    causes = _Causes(timeline)
    path = []
    event = max(timeline.events, key=lambda each: (each.end, each.is_compute), default=None)
    while event:
        path.append(event)
        event = causes.of(event)
    return path[::-1]


class _Causes:
    """What each event of a timeline had to wait for."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.tie = _TIE * timeline.makespan
        self.by_rank: dict[int, list[Event]] = defaultdict(list)
        for event in timeline.computes:
            self.by_rank[event.rank].append(event)

    def of(self, event: Event) -> Event | None:
        """The event whose end let this one begin; None at the start of the step."""
        before = self._before.get(event)
        if not event.is_compute or (before and before.end >= event.start - self.tie):
            return before
        return self.latest_message(event)

    def latest_message(self, compute: Event) -> Event | None:
        """Of the messages that a compute reads, that which arrives last."""
        instruction = compute.instruction
        phase, stage, microbatch = instruction.op.phase, instruction.stage, instruction.microbatch
        read = [*self._readers[phase, stage, microbatch], *self._readers[phase, stage, -1]]
        return max(read, key=lambda message: message.end, default=None)

    @cached_property
    def _before(self) -> Mapping[Event, Event]:
        """The compute of its rank before each compute, and before each message."""
        before: dict[Event, Event] = {}
        last: dict[int, Event] = {}
        for event in self._timeline.events:
            if event.rank in last:
                before[event] = last[event.rank]
            if event.is_compute:
                last[event.rank] = event
        return before

    @cached_property
    def _readers(self) -> Mapping[tuple[Phase | None, int, int], list[Event]]:
        """The messages that each compute reads; microbatch -1 stands for all of a stage's."""
        readers: dict[tuple[Phase | None, int, int], list[Event]] = defaultdict(list)
        for message in self._timeline.messages:
            link = message.instruction.link
            for phase in link.payload.readers if link else ():
                assert link
                readers[phase, link.target, message.instruction.microbatch].append(message)
        return readers


@dataclass(frozen=True, slots=True)
class Held:
    """What a microbatch of a stage holds: ``backward`` from its forward to its input gradient or whole
    backward, ``weight`` from there to its weight gradient, in bytes or any other unit."""

    backward: float = 1.0
    weight: float = 1.0


def memory_over_time(
    timeline: Timeline, held: Mapping[int, Held] | None = None
) -> list[list[tuple[float, float]]]:
    """For each rank the steps of what its microbatches hold: ``(time, amount from then on)``, from time 0.

    ``held[stage]`` is what one microbatch holds, by default 1 until its last compute. A forward holds from
    its start, a backward lets go at its end.
    """
    changes: list[list[tuple[float, float]]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.computes:
        one = (held or {}).get(event.instruction.stage, Held())
        changes[event.rank] += _changes(event, one)
    return [_steps(each) for each in changes]


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


def _steps(changes: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Running totals, one step for all changes at the same time."""
    ordered = sorted([(0.0, 0.0), *changes])
    totals = list(accumulate(change for _, change in ordered))
    times = [time for time, _ in ordered]
    last_of_time = [here != after for here, after in pairwise([*times, None])]
    return [(time, total) for time, total, last in zip(times, totals, last_of_time, strict=True) if last]
