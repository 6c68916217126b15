"""The time of a step explained: the waits of its events, and the critical path."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipec.ir import Op
from pipec.ir.columns import OP_CODE, Floats, InstructionColumns, Ints
from pipec.programs.message_readers import first_readers
from pipec.programs.offload_intervals import copy_dependencies
from pipec.timeline.events import Events, Timeline
from pipec.timeline.simulate import collective_numbers

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

    An idle rank waits for the last message that its next compute reads, or for the collective or the copy
    that its next compute or update needs, if that ends later. If the rank was busy until all of them had
    arrived, or nothing is read, no event is blamed for the idle time: some passes between the computes of a
    recorded step. A recorded message lasts until it is read, so each is assumed to arrive as fast as the
    fastest message between the same stages and ranks.
    """
    events, least = timeline.columns, NEGLIGIBLE * timeline.makespan
    previous = events.latest_before(events.is_blocking)
    free = _at(events.ends, previous, 0.0)
    idle = np.where(events.is_blocking, events.starts - free, 0.0)
    idle[idle <= least] = 0.0
    arrivals = _arrivals(events)
    waiting = np.flatnonzero(idle)
    message, needed = _last_inputs(message_readers(timeline), arrivals)[waiting], _needed(events)[waiting]
    there = _at(arrivals, message, -np.inf), _at(events.ends, needed, -np.inf)
    late = np.maximum(*there) > free[waiting] + least
    awaited = np.full(len(events), -1, np.int32)
    awaited[waiting[late]] = np.where(there[0] >= there[1], message, needed)[late]
    queued = _queued(events, previous, least)
    ops = events.instructions.ops
    masks = (events.is_collective, *(ops == OP_CODE[op] for op in (Op.OFFLOAD, Op.PREFETCH)))
    for mask in filter(np.any, masks):
        before = events.latest_before(mask)
        follows = mask & (_at(events.ends, before, 0.0) > free)
        previous = np.where(follows, before, previous)
    return Attribution(previous, idle, awaited, queued, _last_to_come(events, previous))


def _at(times: Floats, events: Ints, otherwise: float) -> Floats:
    """The times of these events, or ``otherwise`` for -1."""
    return np.where(events < 0, otherwise, times[events])


def message_readers(timeline: Timeline) -> Ints:
    """For each event the compute that reads it first; -1 for computes and messages read after the step."""
    events = timeline.columns
    computes, messages = np.flatnonzero(events.is_compute), np.flatnonzero(events.is_message)
    found = np.full(len(events), -1, np.int32)
    sent = timeline.messages.instructions
    read = first_readers(timeline.computes.instructions, timeline.computes.ranks, sent, sent.peers)
    found[messages] = np.append(computes, -1)[read]
    return found


def _needed(events: Events) -> Ints:
    """For each update the collective before it, for each compute the last collective or copy it needs."""
    update = events.instructions.ops == OP_CODE[Op.UPDATE]
    found = np.where(update, events.latest_before(events.is_collective), -1)
    for needed, computes in _awaited_collectives(events.instructions):
        found[computes] = np.maximum(found, events.latest_before(needed))[computes]
    for reader, copy in zip(*map(np.ndarray.tolist, copy_dependencies(events.instructions)), strict=True):
        if found[reader] < 0 or events.ends[copy] > events.ends[found[reader]]:
            found[reader] = copy
    return found


def _awaited_collectives(events: InstructionColumns) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """Collectives, and the computes that read the last one of them before."""
    gathers, joint = events.ops == OP_CODE[Op.UNSHARD], events.is_collective & (events.model_collectives >= 0)
    for stage in np.unique(events.stages[gathers | joint]).tolist():
        computes = events.is_compute & (events.stages == stage)
        yield gathers & (events.stages == stage), computes
        yield joint & (events.stages == stage), computes & (events.segments > 0)


def _last_to_come(events: Events, previous: Ints) -> Ints:
    """For each collective its event on the rank that reached it last; for a copy itself; -1 elsewhere.

    Ranks that began at the same time are compared by when they were free.
    """
    own = np.flatnonzero(events.is_collective)
    numbers = collective_numbers(events.instructions, events.ranks, own)
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


def _arrivals(events: Events) -> Floats:
    """The time at which each message could be read."""
    ways = events.instructions.link_numbers * (int(events.instructions.peers.max(initial=0)) + 1)
    ways = np.where(events.is_message, ways + events.instructions.peers, 0)
    fastest = np.full(int(ways.max(initial=0)) + 1, np.inf)
    messages = events.is_message
    np.minimum.at(fastest, ways[messages], (events.ends - events.starts)[messages])
    arrivals: Floats = events.starts + fastest[ways]
    return arrivals


def _last_inputs(read_by: Ints, arrivals: Floats) -> Ints:
    """For each event the last message to arrive of those it reads, the first of equals; -1 if it reads none.

    Event 3 reads the messages 0 and 2, which arrive at 5.0 and 4.0::

        read_by [3, -1, 3, -1]  ->  [-1, -1, -1, 0]
    """
    messages = np.flatnonzero(read_by >= 0)[::-1]
    found = np.full(read_by.size, -1, np.int32)
    ascending = messages[np.argsort(arrivals[messages], kind="stable")]
    found[read_by[ascending]] = ascending
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
