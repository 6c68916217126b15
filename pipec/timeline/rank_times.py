"""The time of each rank: work, and waits for messages, collectives and copies."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipec.ir import Op, Payload
from pipec.ir.columns import OPS, Floats, Ints
from pipec.timeline.attribution import NEGLIGIBLE, Attribution
from pipec.timeline.events import Events, Timeline


@dataclass(frozen=True, slots=True)
class RankWait:
    """The time that a rank waits for messages of another rank's stage, a collective of a stage, or a copy.

    For a collective, ``rank`` is the last rank to reach it until that has reached it, and then the waiting
    rank itself, as for a copy. A norm has stage -1.
    """

    rank: int
    stage: int
    what: Payload | Op
    time: float


@dataclass(frozen=True, slots=True)
class RankTime:
    """The time of a rank; the fields add up to the makespan.

    It is ``busy`` with computes and updates. ``waits`` are its waits for messages, collectives and copies,
    longest first. ``unattributed_idle`` is the idle time in which it had all its inputs. ``trailing_idle`` is
    the time after its last compute, update and collective.
    """

    busy: float
    waits: tuple[RankWait, ...]
    unattributed_idle: float
    trailing_idle: float

    @property
    def waiting(self) -> float:
        return sum(each.time for each in self.waits)


def rank_times(timeline: Timeline, found: Attribution) -> tuple[RankTime, ...]:
    """The time of each rank. ``found`` is the result of ``attribute_waits``."""
    events, num_ranks = timeline.columns, timeline.num_ranks
    busy = np.bincount(
        events.ranks, np.where(events.is_blocking, events.ends - events.starts, 0.0), num_ranks
    )
    idle = np.bincount(events.ranks, found.idle, num_ranks)
    worked = _latest_ends(events, events.is_blocking, np.zeros(num_ranks))
    over = _latest_ends(events, events.is_collective, worked)
    awaited = _awaited(events, found, worked, over)
    times = []
    for rank in range(num_ranks):
        waiting = sum(each.time for each in awaited[rank])
        own = float(idle[rank] + over[rank] - worked[rank]) - waiting
        own = own if own > NEGLIGIBLE * timeline.makespan else 0.0
        after = timeline.makespan - float(over[rank])
        times.append(RankTime(float(busy[rank]), tuple(awaited[rank]), own, after))
    return tuple(times)


def _latest_ends(events: Events, mask: NDArray[np.bool_], ends: Floats) -> Floats:
    """For each rank the latest end of its events at which ``mask`` is true, or ``ends`` if that is later."""
    found = ends.copy()
    np.maximum.at(found, events.ranks[mask], events.ends[mask])
    return found


def _awaited(events: Events, found: Attribution, worked: Floats, over: Floats) -> dict[int, list[RankWait]]:
    """The waits of each rank, longest first. Its work ends at ``worked``, its collectives at ``over``."""
    times: dict[tuple[int, int, int, Payload | Op], float] = defaultdict(float)
    for event, message, time in _messages_awaited(events, found):
        link = events[message].instruction.link
        assert link
        times[int(events.ranks[event]), int(events.ranks[message]), link.source, link.payload] += time
    for event, rank, time in _collectives_awaited(events, found, worked, over):
        stage, op = int(events.instructions.stages[event]), OPS[events.instructions.ops[event]]
        times[int(events.ranks[event]), rank, stage, op] += time
    awaited: dict[int, list[RankWait]] = {rank: [] for rank in range(worked.size)}
    late = (found.awaited >= 0) & events.instructions.is_copy[found.awaited]
    for event in np.flatnonzero(late).tolist():
        copy, rank = events[int(found.awaited[event])].instruction, int(events.ranks[event])
        times[rank, rank, copy.stage, copy.op] += float(found.idle[event])
    for (rank, other, stage, what), time in sorted(times.items(), key=lambda pair: -pair[1]):
        if time:
            awaited[rank].append(RankWait(other, stage, what, time))
    return awaited


def _messages_awaited(events: Events, found: Attribution) -> Iterator[tuple[int, int, float]]:
    """For each rank, link and sender: an event that waited, its message, and the time of all of them."""
    late = np.flatnonzero((found.awaited >= 0) & events.is_message[found.awaited])
    messages = found.awaited[late]
    numbers = events.instructions.link_numbers[messages].astype(np.int64)
    num_ranks = int(events.ranks.max(initial=0)) + 1
    kinds = (numbers * num_ranks + events.ranks[late]) * num_ranks + events.ranks[messages]
    firsts, kind = np.unique(kinds, return_index=True, return_inverse=True)[1:]
    times = np.bincount(kind, found.idle[late], firsts.size)
    return zip(late[firsts].tolist(), messages[firsts].tolist(), times.tolist(), strict=True)


def _collectives_awaited(
    events: Events, found: Attribution, worked: Floats, over: Floats
) -> Iterator[tuple[int, int, float]]:
    """Collectives, each with the rank that is waited for, and a time.

    A rank waits before a compute or an update that needs a collective, and after its work until its last
    collective ends.
    """
    before = events.latest_before(events.is_collective)
    late = np.flatnonzero((found.awaited >= 0) & events.is_collective[found.awaited])
    for event in late.tolist():
        start = float(events.starts[event])
        idle = start - float(found.idle[event]), start
        yield from _split_wait(events, found.last, before, int(found.awaited[event]), *idle)
    collectives = np.flatnonzero(events.is_collective)
    ranks, lasts = np.unique(events.ranks[collectives][::-1], return_index=True)
    for rank, event in zip(ranks.tolist(), collectives[::-1][lasts].tolist(), strict=True):
        yield from _split_wait(events, found.last, before, event, float(worked[rank]), float(over[rank]))


def _split_wait(
    events: Events, last: Ints, before: Ints, event: int, start: float, end: float
) -> Iterator[tuple[int, int, float]]:
    """Split the time in which a rank waits for a collective, going back from its end.

    A rank is in one collective after another: first until the last rank reaches it, and then until it ends.
    If it is the last rank itself, it waits for nobody before.
    """
    while event >= 0 and start < end:
        end = min(end, float(events.ends[event]))
        begun = min(max(start, float(events.starts[last[event]])), end)
        earlier = int(before[event])
        come = max(start, float(events.ends[earlier])) if earlier >= 0 else start
        yield event, int(events.ranks[event]), max(end - begun, 0.0)
        if last[event] != event:
            yield event, int(events.ranks[last[event]]), max(begun - come, 0.0)
        event, end = earlier, min(begun, come)
