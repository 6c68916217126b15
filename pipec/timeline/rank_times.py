"""The time of each rank: work, and waits for messages, collectives and copies."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipec.ir import Op, Payload
from pipec.ir.columns import OPS, Ints
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
    the time after its last compute, update and wait.
    """

    busy: float
    waits: tuple[RankWait, ...]
    unattributed_idle: float
    trailing_idle: float

    @property
    def waiting(self) -> float:
        return sum(each.time for each in self.waits)


def rank_times(timeline: Timeline, found: Attribution) -> tuple[RankTime, ...]:
    """The time of each rank. ``found`` is the result of ``attribute_waits``.

    A rank that has ended its work and waits for results is idle, as the script will be.
    """
    events, waits, num_ranks = timeline.columns, timeline.waits, timeline.num_ranks
    busy = np.bincount(
        events.ranks, np.where(events.is_blocking, events.ends - events.starts, 0.0), num_ranks
    )
    idle = np.bincount(events.ranks, found.idle, num_ranks)
    worked = np.zeros(num_ranks)
    np.maximum.at(worked, events.ranks[events.is_blocking], events.ends[events.is_blocking])
    is_result = np.array([*(link.payload.is_result for link in events.instructions.links), False])
    holds_rank = (waits.followed_by >= 0) | ~is_result[events.instructions.link_numbers[waits.awaited]]
    over = worked.copy()
    np.maximum.at(over, waits.ranks[holds_rank], waits.ends[holds_rank])
    long = np.flatnonzero(holds_rank & (waits.ends - waits.starts > NEGLIGIBLE * timeline.makespan))
    awaited = _by_reason(timeline, found, long)
    times = []
    for rank in range(num_ranks):
        waiting = sum(each.time for each in awaited[rank])
        own = float(idle[rank] + over[rank] - worked[rank]) - waiting
        own = own if own > NEGLIGIBLE * timeline.makespan else 0.0
        after = timeline.makespan - float(over[rank])
        times.append(RankTime(float(busy[rank]), tuple(awaited[rank]), own, after))
    return tuple(times)


def _by_reason(timeline: Timeline, found: Attribution, chosen: Ints) -> dict[int, list[RankWait]]:
    """The ``chosen`` waits of each rank, those for the same added up, longest first."""
    events, waits = timeline.columns, timeline.waits
    times: dict[tuple[int, int, int, Payload | Op], float] = defaultdict(float)
    is_message = events.is_message[waits.awaited[chosen]]
    for wait, time in _messages_awaited(timeline, chosen[is_message]):
        message = events[int(waits.awaited[wait])]
        assert message.instruction.link
        link = message.instruction.link
        times[int(waits.ranks[wait]), message.rank, link.source, link.payload] += time
    before = events.latest_before(events.is_collective)
    for wait in chosen[~is_message].tolist():
        held = float(waits.starts[wait]), float(waits.ends[wait])
        rank, event = int(waits.ranks[wait]), int(waits.awaited[wait])
        split = (
            _split_wait(events, found.last, before, event, *held)
            if events.is_collective[event]
            else [(event, rank, held[1] - held[0])]
        )
        for each, other, time in split:
            stage, op = int(events.instructions.stages[each]), OPS[events.instructions.ops[each]]
            times[rank, other, stage, op] += time
    by_rank: dict[int, list[RankWait]] = {rank: [] for rank in range(timeline.num_ranks)}
    for (rank, other, stage, what), time in sorted(times.items(), key=lambda pair: -pair[1]):
        if time:
            by_rank[rank].append(RankWait(other, stage, what, time))
    return by_rank


def _messages_awaited(timeline: Timeline, chosen: Ints) -> Iterator[tuple[int, float]]:
    """For each rank, link and sender: one of the ``chosen`` waits, and the time of all of them."""
    events, waits = timeline.columns, timeline.waits
    messages = waits.awaited[chosen]
    numbers = events.instructions.link_numbers[messages].astype(np.int64)
    kinds = (numbers * timeline.num_ranks + waits.ranks[chosen]) * timeline.num_ranks + events.ranks[messages]
    firsts, kind = np.unique(kinds, return_index=True, return_inverse=True)[1:]
    times = np.bincount(kind, (waits.ends - waits.starts)[chosen], firsts.size)
    return zip(chosen[firsts].tolist(), times.tolist(), strict=True)


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
        reached = max(start, float(events.ends[earlier])) if earlier >= 0 else start
        yield event, int(events.ranks[event]), max(end - begun, 0.0)
        if last[event] != event:
            yield event, int(events.ranks[last[event]]), max(begun - reached, 0.0)
        event, end = earlier, min(begun, reached)
