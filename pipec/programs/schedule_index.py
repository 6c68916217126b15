"""The computes of a schedule by position on their rank. Misplaced ones are rejected.

A compute that runs segment by segment takes as many positions as it has segments.
"""

from collections.abc import Sequence

import numpy as np

from pipec.errors import VerifyError
from pipec.ir import Link, Phase, Plan, Schedule
from pipec.ir.columns import (
    PHASES,
    ComputeColumns,
    Ints,
    constant,
    entries,
    is_constant,
    ranks_by_microbatch,
    set_entries,
)
from pipec.programs.compute_segments import segment_counts
from pipec.programs.counterexample import counterexample


class ScheduleIndex:
    """The computes of a schedule, numbered rank by rank, and their positions on each rank, from 1.

    A compute that the plan splits into segments, to run collectives between them, is listed once for each.
    ``counts[rank]`` has the number of segments of each compute of a rank, and ``segments[rank]`` the segment
    of each entry, or -1 for a whole compute. ``firsts`` and ``lasts`` have the positions at [phase, stage,
    microbatch], or 0.

    Raises:
        VerifyError: a compute names a stage or microbatch that the schedule does not have, is on a rank that
            does not hold its stage, or is repeated.
    """

    def __init__(self, schedule: Schedule, plan: Plan) -> None:
        self.schedule = schedule
        self.computes = [ComputeColumns.of(order) for order in schedule.orders]
        self.ranks = ranks_by_microbatch(schedule.placement, schedule.num_microbatches)
        for rank, computes in enumerate(self.computes):
            self._check_place(rank, computes)
        self.counts, self.segments = list[Ints](), list[Ints]()
        several, model_collectives = plan.segments, plan.model_collectives
        for rank, computes in enumerate(self.computes):
            counts = segment_counts(computes, plan.sync_spec, several, model_collectives)
            segments = constant(-1, counts.size)
            if (counts > 1).any():
                self.computes[rank] = computes.repeated(counts)
                segments = np.where(counts.repeat(counts) > 1, _places(counts), -1)
                counts = counts.repeat(counts)
            self.counts.append(counts)
            self.segments.append(segments)
        self.first_tasks: list[int] = [0, *np.cumsum([len(computes) for computes in self.computes]).tolist()]
        self.lasts = self._positions(first=False)
        self._check_once()
        is_segmented = any(not is_constant(each) for each in self.segments)
        self.firsts = self._positions(first=True) if is_segmented else self.lasts

    def length(self, rank: int) -> int:
        return len(self.computes[rank])

    def compute_numbers(self, rank: int, positions: Ints) -> Ints:
        """The numbers of the computes at these positions of a rank."""
        return positions + (self.first_tasks[rank] - 1)

    def positions_of(self, link: Link, phases: Sequence[Phase], stage: int) -> Ints:
        """For each microbatch, the position of the first of ``phases`` that a stage of ``link`` runs.

        A producer of a message ends with its last segment, and a reader begins with its first.
        """
        positions = self.lasts if stage == link.source else self.firsts
        found: Ints = np.zeros(self.schedule.num_microbatches, np.int32)
        for phase in phases:
            found = np.where(found, found, positions[PHASES.index(phase), stage])
        if missing := np.flatnonzero(found == 0).tolist():
            names = ", ".join(link.names)
            rank = int(self.ranks[stage, missing[0]])
            raise VerifyError(
                f"schedule {self.schedule.name!r} never runs {' or '.join(phases)} of stage {stage}, "
                f"microbatch {missing[0]}, but {names} from stage {link.source} to stage {link.target} needs "
                f"it; add the compute to rank {rank} or leave out the link\n"
                + self._counterexample({rank: self._last_of(stage, missing[0])})
            )
        return found

    def explain_stuck(self, computes: Ints) -> str:
        """The error text for computes that wait for each other, at most one of each rank."""
        ranks = np.searchsorted(self.first_tasks, computes, "right") - 1
        marked = {
            rank: compute - self.first_tasks[rank]
            for rank, compute in zip(ranks.tolist(), computes.tolist(), strict=True)
        }
        stuck = []
        for rank, place in marked.items():
            compute = self.computes[rank][place]
            stuck.append(f"rank {rank} at {compute.phase} {compute.stage} of mb {compute.microbatch}")
        return (
            f"schedule {self.schedule.name!r} cannot finish: these computes wait for each other: "
            f"{'; '.join(stuck)}; order each rank's computes so that every value is made before it is read\n"
            + self._counterexample(marked)
        )

    def _positions(self, *, first: bool) -> Ints:
        shape = (len(PHASES), self.schedule.num_stages, self.schedule.num_microbatches)
        found = np.zeros(shape, np.int32)
        for rank, computes in enumerate(self.computes):
            own = self._first_segments(rank) if first else self._last_segments(rank)
            rows = computes.phases[own] * shape[1] + computes.stages[own]
            set_entries(found.reshape(-1, shape[2]), rows, computes.microbatches[own], own + 1)
        return found

    def _first_segments(self, rank: int) -> Ints:
        return np.flatnonzero(self.segments[rank] <= 0)

    def _last_segments(self, rank: int) -> Ints:
        segments = self.segments[rank]
        return np.flatnonzero((segments < 0) | (segments == self.counts[rank] - 1))

    def _check_once(self) -> None:
        """Reject a repeated compute: in the table of positions, the later one has overwritten the earlier."""
        if np.count_nonzero(self.lasts) == sum(map(len, self.schedule.orders)):
            return
        for rank, computes in enumerate(self.computes):
            own = self._last_segments(rank)
            at = computes.phases[own], computes.stages[own], computes.microbatches[own]
            for again in own[self.lasts[at] != own + 1].tolist()[:1]:
                raise VerifyError(self._complaint(rank, again, "and once more; expected it once"))

    def _check_place(self, rank: int, computes: ComputeColumns) -> None:
        schedule = self.schedule
        valid = (computes.stages >= 0) & (computes.stages < schedule.num_stages)
        valid &= (computes.microbatches >= 0) & (computes.microbatches < schedule.num_microbatches)
        at = np.where(valid, computes.stages, 0), np.where(valid, computes.microbatches, 0)
        here = entries(self.ranks, *at) == rank
        for place in np.flatnonzero(~(valid & here)).tolist()[:1]:
            compute = computes[place]
            if not valid[place]:
                stages, microbatches = schedule.num_stages, schedule.num_microbatches
                expected = f"stages 0 to {stages - 1} and microbatches 0 to {microbatches - 1}"
            else:
                expected = (
                    f"it on rank {self.ranks[compute.stage, compute.microbatch]}, which holds that stage"
                )
            raise VerifyError(self._complaint(rank, place, f"expected {expected}"))

    def _complaint(self, rank: int, place: int, text: str) -> str:
        compute = self.computes[rank][place]
        return (
            f"schedule {self.schedule.name!r} runs {compute.phase} of stage {compute.stage}, microbatch "
            f"{compute.microbatch} on rank {rank}; {text}\n" + self._counterexample({rank: place})
        )

    def _last_of(self, stage: int, microbatch: int) -> int:
        """The place of the last compute of a stage and microbatch, or else of its rank."""
        last = int(self.lasts[:, stage, microbatch].max())
        return (last or self.length(int(self.ranks[stage, microbatch]))) - 1

    def _counterexample(self, marked: dict[int, int]) -> str:
        return counterexample(self.computes, self.schedule.placement, marked)


def _places(counts: Ints) -> Ints:
    """The index of each repetition, for counts of repetitions: 2 3 1 -> 0 1 0 1 2 0."""
    first: Ints = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int32) - first.repeat(counts).astype(np.int32)
