"""The events and the waits of a step, read off its programs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipec.ir import WAIT_OF, Op
from pipec.ir.columns import (
    FIELDS,
    OP_CODE,
    OPS,
    Floats,
    InstructionColumns,
    Ints,
    concatenate_instructions,
    one_of,
    taken,
)
from pipec.programs.messages import Transfers

COPY_LANES = ((Op.OFFLOAD, Op.STORE), (Op.PREFETCH, Op.LOAD), (Op.HOST_UPDATE,))
"""What a rank does one after the other beside its work: copies to the host and back, and what the host
does."""

_STARTED_OP = np.array([OP_CODE[op.traits.awaits or op] for op in OPS], np.int32)
_STARTING = [op for op in WAIT_OF if op is not Op.RECV]
_IS_WAIT = one_of(*(WAIT_OF[op] for op in _STARTING))
_HOLDS_RANK = _IS_WAIT | one_of(Op.WAIT_RECV, Op.GRAD_NORM)


@dataclass(frozen=True, eq=False)
class Waits:
    """The waits of a step, rank by rank and in the order of its program, entry by entry.

    From ``starts`` to ``ends`` rank ``ranks`` waits until the message, the collective or the copy ``awaited``
    has ended, before the compute or the update ``followed_by``; -1 means none. Both are numbers of events. A
    norm is its own wait.
    """

    ranks: Ints
    awaited: Ints
    followed_by: Ints
    starts: Floats
    ends: Floats

    @classmethod
    def none(cls) -> "Waits":
        return cls(*(np.empty(0, np.int32),) * 3, *(np.empty(0),) * 2)


class StepEvents:
    """The timed instructions of all ranks, rank by rank; and, entry by entry, the waits between them.

    ``first_events[rank]`` is the first event of a rank. Wait k is instruction ``wait_sites[k]`` of rank
    ``wait_ranks[k]``, for the event ``awaited[k]``, which is -1 if no program starts it. Event
    ``next_events[k]`` is the first one after the wait, maybe of the next rank.
    """

    def __init__(self, programs: Sequence[InstructionColumns]) -> None:
        timed = [np.flatnonzero(each.is_timed) for each in programs]
        counts = [numbers.size for numbers in timed]
        self.events = concatenate_instructions(
            [each.taken(numbers) for each, numbers in zip(programs, timed, strict=True)]
        )
        self.first_events = np.append(0, np.cumsum(counts)).astype(np.int32)
        self.ranks = np.repeat(np.arange(len(programs), dtype=np.int32), counts)
        sites = [np.flatnonzero(_HOLDS_RANK[each.ops]) for each in programs]
        self.wait_ranks = np.repeat(np.arange(len(programs), dtype=np.int32), [each.size for each in sites])
        self.wait_sites = np.concatenate([np.empty(0, np.int32), *sites]).astype(np.int32)
        awaited, following = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
        for columns, first, own in zip(programs, self.first_events, sites, strict=False):
            before = first + np.cumsum(columns.is_timed, dtype=np.int32)
            started = own.copy()
            waits, starts = awaited_starts(columns)
            started[np.searchsorted(own, waits)] = starts
            awaited.append(before[started] - 1)
            following.append(before[own])
        self.awaited, self.next_events = np.concatenate(awaited), np.concatenate(following)
        waits = np.concatenate([each.ops[own] for each, own in zip(programs, sites, strict=True)])
        if (messages := np.flatnonzero(waits == OP_CODE[Op.WAIT_RECV])).size:
            sends = np.flatnonzero(self.events.ops == OP_CODE[Op.SEND]).astype(np.int32)
            found = Transfers.of(programs, Op.SEND).sends_of(Transfers.of(programs, Op.WAIT_RECV))
            self.awaited[messages] = np.append(sends, np.int32(-1))[found]

    @cached_property
    def next_blocking(self) -> Ints:
        """For each event, and for the end, the next one on any rank that occupies its rank, or itself."""
        numbers = np.arange(len(self.events) + 1, dtype=np.int32)
        blocking = np.where(np.append(self.events.is_blocking, True), numbers, numbers.size)
        return np.minimum.accumulate(blocking[::-1])[::-1]

    def waits(self, starts: Floats, ends: Floats) -> Waits:
        """The waits, given the times when they began and ended."""
        following = self.next_blocking[self.next_events]
        found = np.where(following < self.first_events[self.wait_ranks + 1], following, -1)
        return Waits(self.wait_ranks, self.awaited, found, starts, ends)


def awaited_starts(columns: InstructionColumns) -> tuple[Ints, Ints]:
    """The numbers of the waits for collectives and copies, and of the instruction that started each.

    A wait is for the last start with the same fields before it.
    """
    involved = columns.numbers_of(*_STARTING, *(WAIT_OF[op] for op in _STARTING))
    names = ("stage", "microbatch", "bucket", "model_collective")
    fields = [taken(columns.columns[FIELDS.index(name)], involved) for name in names]
    ordered = involved[np.lexsort([involved, *fields, _STARTED_OP[columns.ops[involved]]])]
    waits = np.flatnonzero(_IS_WAIT[columns.ops[ordered]])
    return ordered[waits], ordered[waits - 1]
