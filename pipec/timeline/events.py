"""The timeline of a step, simulated or recorded: its events as columns, and its figures of merit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipec.ir import NO_SYNC, Instruction, Op, OpKind, Phase, RepresentativeRanks, SyncSpec
from pipec.ir.columns import (
    NUM_COLUMNS,
    OP_CODE,
    Column,
    Floats,
    InstructionColumns,
    Ints,
    OpColumns,
    constant,
)
from pipec.timeline.step_events import Waits


@dataclass(frozen=True, slots=True)
class Event:
    """A compute or an update while it runs, a message from its send to its arrival, a collective or a copy.

    A collective is an event on each of its ranks. A simulated one begins when the last of them has reached
    it, a recorded one when its own rank has.
    """

    rank: int
    instruction: Instruction
    start: float
    end: float

    @property
    def is_compute(self) -> bool:
        return self.instruction.op.traits.kind is OpKind.COMPUTE

    @property
    def is_collective(self) -> bool:
        return self.instruction.op.traits.kind is OpKind.COLLECTIVE

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy to host memory, or back."""
        return self.instruction.op.traits.kind is OpKind.COPY

    @property
    def is_overlapped(self) -> bool:
        """Whether it runs beside the work of its rank: a collective or a copy."""
        return self.is_collective or self.is_copy

    @property
    def is_blocking(self) -> bool:
        """Whether it occupies its rank: a compute or an update."""
        return self.instruction.op.traits.kind in (OpKind.COMPUTE, OpKind.STEP_COMPUTE)


class Events(OpColumns[Event]):
    """Events as columns: those of their instructions, their ranks, and when they start and end."""

    ranks = Column[Ints](NUM_COLUMNS)
    starts, ends = (Column[Floats](NUM_COLUMNS + number) for number in (1, 2))

    @classmethod
    def at(cls, ranks: Ints, instructions: InstructionColumns, starts: Floats, ends: Floats) -> "Events":
        """The events of these instructions."""
        return cls((*instructions.columns, ranks, starts, ends), instructions.links)

    @classmethod
    def of(cls, events: Sequence[Event]) -> "Events":
        """``events`` as columns; unchanged if it is columns already."""
        if isinstance(events, Events):
            return events
        ranks = np.array([event.rank for event in events], np.int32)
        starts, ends = (np.array([getattr(event, name) for event in events]) for name in ("start", "end"))
        return cls.at(ranks, InstructionColumns.of([each.instruction for each in events], ()), starts, ends)

    def _row(self, *numbers: Any) -> Event:
        *fields, rank, start, end = numbers
        return Event(rank, self._instruction(*fields), start, end)

    @cached_property
    def instructions(self) -> InstructionColumns:
        return InstructionColumns(self.columns[:NUM_COLUMNS], self.links)

    @property
    def is_message(self) -> NDArray[np.bool_]:
        messages: NDArray[np.bool_] = self.ops == OP_CODE[Op.SEND]
        return messages

    def latest_before(self, mask: NDArray[np.bool_]) -> Ints:
        """For each event the last one before it on its rank at which ``mask`` is true, or -1."""
        if not mask.any():
            return constant(-1, len(self))
        before = np.empty(len(self), np.int32)
        before[0] = -1
        np.maximum.accumulate(np.where(mask, np.arange(len(self), dtype=np.int32), -1)[:-1], out=before[1:])
        before[before < self._bounds.astype(np.int32)[self.ranks]] = -1
        return before

    def of_rank(self, rank: int) -> "Events":
        """The events of a rank, in order."""
        last = self._bounds.size - 1
        return self.between(int(self._bounds[min(rank, last)]), int(self._bounds[min(rank + 1, last)]))

    @cached_property
    def _bounds(self) -> Ints:
        """The first event of each rank, and the number of all."""
        num_ranks = int(self.ranks.max(initial=-1)) + 1
        return np.searchsorted(self.ranks, np.arange(num_ranks + 1, dtype=self.ranks.dtype))


@dataclass(frozen=True)
class Timeline:
    """One step, from time 0. ``peak_in_flight[rank]`` counts pairs of stage and microbatch.

    ``events`` are ordered by rank, then as in its program. ``sync_spec`` describes the data of collectives,
    if known. With ``representatives``, the ranks of the timeline represent more ranks.
    """

    events: Sequence[Event]
    peak_in_flight: tuple[int, ...]
    unit: str = "s"
    sync_spec: SyncSpec = NO_SYNC
    representatives: RepresentativeRanks | None = None
    waits: Waits = field(default_factory=Waits.none, compare=False)

    @property
    def num_ranks(self) -> int:
        return len(self.peak_in_flight)

    def global_rank(self, rank: int) -> int:
        """The number that a rank of the timeline has in the step."""
        return self.representatives.ranks[rank] if self.representatives else rank

    @cached_property
    def columns(self) -> Events:
        return Events.of(self.events)

    @cached_property
    def makespan(self) -> float:
        """The time when the last event ends."""
        return float(self.columns.ends.max(initial=0.0))

    @cached_property
    def span(self) -> float:
        """The longest time any rank takes from the start of its first compute to the end of its last."""
        computes = self.computes
        if not len(computes):
            return 0.0
        first_of_rank = np.unique(computes.ranks, return_index=True)[1]
        starts = np.minimum.reduceat(computes.starts, first_of_rank)
        ends = np.maximum.reduceat(computes.ends, first_of_rank)
        return float((ends - starts).max())

    @cached_property
    def bubble_rate(self) -> float:
        """The share of ``span`` in which the ranks, on average, compute nothing."""
        return self._fraction_outside(Phase.FORWARD, *_BACKWARDS, Phase.RECOMPUTE)

    @cached_property
    def overhead_rate(self) -> float:
        """``bubble_rate`` with repeated forwards counted as lost: 1 - m(F+B+W) / span for equal stages."""
        return self._fraction_outside(Phase.FORWARD, *_BACKWARDS)

    @cached_property
    def computes(self) -> Events:
        return self.columns.where(self.columns.is_compute)

    @cached_property
    def messages(self) -> Events:
        return self.columns.where(self.columns.is_message)

    @cached_property
    def overlapped(self) -> Events:
        """The collectives and copies."""
        return self.columns.where(self.columns.is_overlapped)

    @cached_property
    def blocking(self) -> Events:
        """The computes and updates."""
        work = self.columns.is_blocking
        return self.columns.where(work) if np.count_nonzero(work) > len(self.computes) else self.computes

    @cached_property
    def stages(self) -> tuple[Sequence[int], ...]:
        """The stages that each rank computes, ascending."""
        return tuple(
            np.unique(self.computes.of_rank(rank).instructions.stages).tolist()
            for rank in range(self.num_ranks)
        )

    @cached_property
    def replicas(self) -> Mapping[int, Sequence[int]]:
        """The ranks that compute each stage, in the order in which they take microbatches."""
        instructions, ranks = self.computes.instructions, self.computes.ranks
        pairs = instructions.stages * np.int64(self.num_ranks) + ranks
        numbers, own = np.unique(pairs, return_inverse=True)
        firsts = np.full(numbers.size, np.iinfo(np.int32).max)
        np.minimum.at(firsts, own, instructions.microbatches)
        stages, held = np.divmod(numbers, self.num_ranks)
        found: dict[int, list[int]] = {}
        for place in np.lexsort((firsts, stages)).tolist():
            found.setdefault(int(stages[place]), []).append(int(held[place]))
        return found

    def _fraction_outside(self, *phases: Phase) -> float:
        computes = self.computes
        included = np.isin(computes.instructions.ops, [OP_CODE[Op(phase)] for phase in phases])
        counts = np.array(self.representatives.counts if self.representatives else [1] * self.num_ranks)
        times = (computes.ends - computes.starts)[included] * counts[computes.ranks[included]]
        return 1 - float(times.sum()) / (int(counts.sum()) * self.span) if self.span else 0.0


_BACKWARDS = (Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
