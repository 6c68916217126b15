"""The time of a step explained: the waits of its events, and the critical path."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipec.ir.columns import Floats, Ints, constant, one_of
from pipec.programs.messages import collective_numbers
from pipec.timeline.events import Events, Timeline
from pipec.timeline.step_events import COPY_LANES

NEGLIGIBLE = 1e-6
"""Shorter waits, as a share of the makespan, are rounding errors: times are sums of floats."""


@dataclass(frozen=True, eq=False)
class Attribution:
    """The causes of each event of a timeline, entry by entry; -1 means none.

    ``previous`` is the compute or update before it on the same rank; for a collective or a copy it is the
    previous one of its kind if that ended later. ``idle`` is the idle time of a rank before a compute or an
    update, and ``awaited`` the message, the collective or the copy that ended it. ``queued_behind`` is, for a
    message that had to wait for its channel, the previous message on the channel. ``last`` is, for a
    collective, its event on the rank that reached it last; for a copy, the copy itself.
    """

    previous: Ints
    idle: Floats
    awaited: Ints
    queued_behind: Ints
    last: Ints

    @cached_property
    def blocking_event(self) -> Ints:
        """For each event, the event without which it could have begun earlier.

        A collective is represented by its event on the rank that reached it last.
        """
        awaited = np.maximum(self.awaited, self.queued_behind)
        causes = np.where(awaited < 0, self.previous, awaited)
        if (self.last < 0).all():
            return causes
        last = np.append(self.last, -1)[causes]
        return np.where(last < 0, causes, last)


def attribute_waits(timeline: Timeline) -> Attribution:
    """The wait of each event, in the order of the events.

    A rank that is idle before a compute or an update waits for what the last wait there was for that took
    time. Without such a wait no event is blamed: some time passes between the computes of a recorded step.
    """
    events, least = timeline.columns, NEGLIGIBLE * timeline.makespan
    previous = events.latest_before(events.is_blocking)
    free = _at(events.ends, previous, 0.0)
    idle = np.where(events.is_blocking, events.starts - free, 0.0)
    idle[idle <= least] = 0.0
    waits, awaited = timeline.waits, constant(-1, len(events) + 1).copy()
    long = waits.ends - waits.starts > least
    awaited[waits.followed_by[long]] = waits.awaited[long]
    awaited = np.where(idle > 0, awaited[:-1], -1)
    queued = _queued(events, previous, least)
    ops = events.instructions.ops
    masks = (events.is_collective, *(one_of(*lane)[ops] for lane in COPY_LANES))
    for mask in filter(np.any, masks):
        before = events.latest_before(mask)
        follows = mask & (_at(events.ends, before, 0.0) > free)
        previous = np.where(follows, before, previous)
    return Attribution(previous, idle, awaited, queued, _last_to_reach(events, previous))


def _at(times: Floats, events: Ints, otherwise: float) -> Floats:
    """The times of these events, or ``otherwise`` for -1."""
    return np.where(events < 0, otherwise, times[events])


def _last_to_reach(events: Events, previous: Ints) -> Ints:
    """For each collective its event on the rank that reached it last; for a copy itself; -1 elsewhere.

    Ranks that began at the same time are compared by when they were free.
    """
    own = np.flatnonzero(events.is_collective)
    numbers = collective_numbers(events.instructions.taken(own), events.ranks[own])
    free = _at(events.ends, previous[own], 0.0)
    latest = np.full(int(numbers.max(initial=-1)) + 1, -1)
    ascending = np.lexsort([free, events.starts[own]])
    latest[numbers[ascending]] = own[ascending]
    found = np.full(len(events), -1, np.int32)
    found[own] = latest[numbers]
    copies = np.flatnonzero(events.instructions.is_copy)
    found[copies] = copies
    return found


def _queued(events: Events, previous: Ints, least: float) -> Ints:
    """For each message that waited until its channel had carried another one, that one; -1 elsewhere."""
    messages = np.flatnonzero(events.is_message)
    channels = (events.ranks.astype(np.int64) << 32) + events.instructions.peers
    messages = messages[np.argsort(channels[messages], kind="stable")]
    before, after = messages[:-1], messages[1:]
    waited = np.abs(events.starts[after] - events.ends[before]) <= least
    waited &= channels[before] == channels[after]
    waited &= events.starts[after] > _at(events.ends, previous[after], 0.0) + least
    found = np.full(len(events), -1, np.int32)
    found[after[waited]] = before[waited]
    return found


def critical_path(timeline: Timeline, found: Attribution) -> tuple[int, ...]:
    """The events, first to last, each of which delayed the next; the last one ends the step.

    ``found`` is the result of ``attribute_waits`` for the timeline.
    """
    events = timeline.columns
    last = np.flatnonzero(events.ends == timeline.makespan)
    at = int(last[np.argmax(events.is_blocking[last])]) if last.size else -1
    at = max(at, int(np.append(found.last, -1)[at]))
    path: list[int] = []
    while at >= 0:
        path.append(at)
        at = int(found.blocking_event[at])
    return tuple(reversed(path))


def critical_path_times(timeline: Timeline, path: Sequence[int]) -> list[float]:
    """The time of each event of a critical path after the end of the previous one.

    Recorded messages and collectives may begin before the event they wait for has ended.
    """
    events = timeline.columns
    ends = np.maximum.accumulate(events.ends[list(path)])
    starts = np.maximum(events.starts[list(path)], np.concatenate([[0.0], ends])[: len(path)])
    times: list[float] = np.maximum(ends - starts, 0.0).tolist()
    return times
