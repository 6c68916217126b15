"""Why a step takes as long as it does: what ranks wait for, the critical path, and memory over time."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from pipec.ir import Payload, Plan, StageMemory, stages_on
from pipec.ir.columns import Floats, Ints
from pipec.programs.consumers import first_readers
from pipec.timeline.events import Events, Timeline

Curve = Sequence[tuple[float, float]]
"""Times, ascending, each with the amount held from then on."""

_NEGLIGIBLE = 1e-6
"""Share of the makespan below which a rank is not said to have waited: times are sums of floats."""


@dataclass(frozen=True, eq=False)
class Attribution:
    """What came right before each event of a timeline, entry by entry; -1 stands for nothing.

    ``previous`` is the compute that ran before it on the same rank. ``idle`` is how long a rank computed
    nothing before a compute, and ``messages`` the message that ended this. ``queued`` is, for a message that
    had to wait for its channel, the message that the channel carried until then.
    """

    previous: Ints
    idle: Floats
    messages: Ints
    queued: Ints

    @cached_property
    def causes(self) -> Ints:
        """For each event the one without which it could have begun earlier."""
        awaited = np.maximum(self.messages, self.queued)
        return np.where(awaited < 0, self.previous, awaited)


def waits(timeline: Timeline) -> Attribution:
    """What each event waited for, in the order of the events.

    An idle rank waits for the message that arrives last of those that its next compute reads. If the rank
    was busy until all of them had arrived, or the compute reads none, the idle time is the rank's own: some
    passes between the computes of a recorded step. A recorded message lasts until it is read, so each is
    taken to arrive as fast as the fastest message between the same stages and ranks.
    """
    events, least = timeline.columns, _NEGLIGIBLE * timeline.makespan
    previous = _previous(events)
    free = np.append(events.ends, 0.0)[previous]
    idle = np.where(events.is_compute, events.starts - free, 0.0)
    idle[idle <= least] = 0.0
    arrivals = _arrivals(events)
    last = _last_inputs(readers(timeline), arrivals)
    late = (idle > 0) & (np.append(arrivals, -np.inf)[last] > free + least)
    queued = _queued(events, previous, least)
    return Attribution(previous, idle, np.where(late, last, -1), queued)


def readers(timeline: Timeline) -> Ints:
    """For each event the compute that reads it first; -1 for computes and for what is read after the step."""
    events = timeline.columns
    computes, messages = np.flatnonzero(events.is_compute), np.flatnonzero(events.is_message)
    found = np.full(len(events), -1)
    sent = timeline.messages.instructions
    read = first_readers(timeline.computes.instructions, timeline.computes.ranks, sent, sent.peers)
    found[messages] = np.append(computes, -1)[read]
    return found


def _previous(events: Events) -> Ints:
    """The compute before each event on its rank, or -1."""
    numbers = np.arange(len(events))
    latest = np.maximum.accumulate(np.where(events.is_compute, numbers, -1))
    before = np.concatenate([[-1], latest])[: len(events)]
    return np.where(before < np.searchsorted(events.ranks, events.ranks), -1, before)


def _queued(events: Events, previous: Ints, least: float) -> Ints:
    """For each message that left only when its channel had carried another one, that other; -1 elsewhere."""
    messages = np.flatnonzero(events.is_message)
    channels = (events.ranks.astype(np.int64) << 32) + events.instructions.peers
    messages = messages[np.argsort(channels[messages], kind="stable")]
    before, after = messages[:-1], messages[1:]
    waited = np.abs(events.starts[after] - events.ends[before]) <= least
    waited &= channels[before] == channels[after]
    waited &= events.starts[after] > np.append(events.ends, 0.0)[previous[after]] + least
    found = np.full(len(events), -1)
    found[after[waited]] = before[waited]
    return found


def _arrivals(events: Events) -> Floats:
    """When each message could be read."""
    ways = events.instructions.link_numbers * (int(events.instructions.peers.max(initial=0)) + 1)
    ways = np.where(events.is_message, ways + events.instructions.peers, 0)
    fastest = np.full(int(ways.max(initial=0)) + 1, np.inf)
    messages = events.is_message
    np.minimum.at(fastest, ways[messages], (events.ends - events.starts)[messages])
    arrivals: Floats = events.starts + fastest[ways]
    return arrivals


def _last_inputs(read_by: Ints, arrivals: Floats) -> Ints:
    """For each event the message it reads that arrives last, of several the first; -1 where it reads none.

    Event 3 reads the messages 0 and 2, which arrive at 5.0 and 4.0::

        read_by [3, -1, 3, -1]  ->  [-1, -1, -1, 0]
    """
    messages = np.flatnonzero(read_by >= 0)[::-1]
    found = np.full(read_by.size, -1)
    ascending = messages[np.argsort(arrivals[messages], kind="stable")]
    found[read_by[ascending]] = ascending
    return found


def critical_path(timeline: Timeline, found: Attribution) -> tuple[int, ...]:
    """The events, first to last, each of which kept the next from beginning; the last one ends the step.

    ``found`` are the ``waits`` of the timeline.
    """
    events = timeline.columns
    last = np.flatnonzero(events.ends == timeline.makespan)
    at = int(last[np.argmax(events.is_compute[last])]) if last.size else -1
    path: list[int] = []
    while at >= 0:
        path.append(at)
        at = int(found.causes[at])
    return tuple(reversed(path))


@dataclass(frozen=True, slots=True)
class Awaited:
    """How long a rank waits for what a stage of another rank sends."""

    rank: int
    stage: int
    payload: Payload
    time: float


@dataclass(frozen=True, slots=True)
class RankTime:
    """Where the time of a rank goes; the parts add up to the makespan.

    It is ``busy`` computing, or waits for messages, ``waits``, longest first; ``own`` is the idle time in
    which all it needed was there, ``after`` that behind its last compute.
    """

    busy: float
    waits: tuple[Awaited, ...]
    own: float
    after: float

    @property
    def waiting(self) -> float:
        return sum(each.time for each in self.waits)


def rank_times(timeline: Timeline, found: Attribution) -> tuple[RankTime, ...]:
    """Where the time of each rank goes. ``found`` are the ``waits`` of the timeline."""
    events, num_ranks = timeline.columns, timeline.num_ranks
    computes = events.is_compute
    busy = np.bincount(events.ranks, np.where(computes, events.ends - events.starts, 0.0), num_ranks)
    own = np.bincount(events.ranks, np.where(found.messages < 0, found.idle, 0.0), num_ranks)
    ends = np.zeros(num_ranks)
    np.maximum.at(ends, events.ranks[computes], events.ends[computes])
    awaited = _awaited(events, found)
    after = timeline.makespan - ends
    return tuple(
        RankTime(float(busy[rank]), tuple(awaited[rank]), float(own[rank]), float(after[rank]))
        for rank in range(num_ranks)
    )


def _awaited(events: Events, found: Attribution) -> dict[int, list[Awaited]]:
    """What each rank waits for, longest first."""
    late = np.flatnonzero(found.messages >= 0)
    messages = found.messages[late]
    numbers, links = events.instructions.link_numbers[messages], events.instructions.links
    kinds = events.ranks[late].astype(np.int64) * len(links) + numbers
    firsts, kind = np.unique(kinds, return_index=True, return_inverse=True)[1:]
    times = np.bincount(kind, found.idle[late])
    awaited: dict[int, list[Awaited]] = defaultdict(list)
    for place in np.argsort(-times, kind="stable").tolist():
        first = firsts[place]
        link, sender = links[numbers[first]], int(events.ranks[messages[first]])
        one = Awaited(sender, link.source, link.payload, float(times[place]))
        awaited[int(events.ranks[late[first]])].append(one)
    return awaited


_IN_FLIGHT = StageMemory(saved=1, kept=1)


def memory_over_time(
    timeline: Timeline, memory: Mapping[int, StageMemory] | None = None
) -> tuple[Curve, ...]:
    """For each rank the steps of what its microbatches hold: ``(time, amount from then on)``, from time 0.

    ``memory[stage]`` is what a stage holds. By default a microbatch holds 1 until its last compute, which
    counts the pairs of stage and microbatch in flight.
    """
    changes: list[list[tuple[float, float]]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.computes:
        stage, phase = event.instruction.stage, event.instruction.op.phase
        assert phase
        growth = (memory or {}).get(stage, _IN_FLIGHT).growth(phase)
        changes[event.rank] += zip((event.start, event.end), growth, strict=True)
    return tuple(map(_steps, changes))


def rank_memory_over_time(plan: Plan, timeline: Timeline) -> tuple[Curve, ...]:
    """The bytes that each rank holds over time, with what its stages hold once."""
    stages = {stage.index: stage.cost.memory for stage in plan.stages}
    curves = []
    for rank, curve in enumerate(memory_over_time(timeline, stages)):
        static = sum(stages[stage].static for stage in stages_on(plan.placement, rank))
        curves.append([(time, static + amount) for time, amount in curve])
    return tuple(curves)


def _steps(changes: Sequence[tuple[float, float]]) -> Curve:
    """Running totals, one step for all changes at the same time."""
    ordered = sorted([(0.0, 0.0), *((time, change) for time, change in changes if change)])
    totals = list(accumulate(change for _, change in ordered))
    times = [time for time, _ in ordered]
    last_of_time = [here != after for here, after in pairwise([*times, None])]
    return [(time, total) for time, total, last in zip(times, totals, last_of_time, strict=True) if last]
