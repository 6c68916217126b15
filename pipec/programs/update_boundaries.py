"""Update boundaries: the end of each round of a stage in an asynchronous schedule.

The replicas of a stage sum the gradients of a round as soon as the last of them has made its own. Each makes
its update directly before it first reads the new version, or completes the gradients of the next round. Until
then the sum may take. A stage on one rank has nothing to sum, and updates at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipec.ir import GRADIENT_PHASES, Op, Phase, Schedule, SyncSpec, replica_counts
from pipec.ir.columns import PHASE_CODE, PHASES, Floats, Ints, read_versions
from pipec.programs.schedule_index import ScheduleIndex
from pipec.programs.sync_order import SyncOp

_GRADIENTS = [PHASES.index(phase) for phase in GRADIENT_PHASES]


@dataclass(frozen=True)
class UpdateBoundary:
    """The end of a round of ``stage`` that begins with microbatch ``first`` and makes ``version``.

    By rank, ``ready`` has the position of the last compute that makes gradients of the round, ``following``
    and ``next_ready`` the positions of the first and the last such compute of the next round, and ``readers``
    the position of the first compute that reads the new version.
    """

    stage: int
    first: int
    version: int
    ready: Mapping[int, int]
    following: Mapping[int, int]
    next_ready: Mapping[int, int]
    readers: Mapping[int, int]


def update_boundaries(index: ScheduleIndex) -> list[UpdateBoundary]:
    """The ends of all rounds of a schedule, by stage; none without a stream."""
    if index.schedule.stream is None:
        return []
    schedule = index.schedule
    versions = read_versions(schedule.stream, schedule.placement, schedule.num_microbatches)
    return [each for stage, own in enumerate(versions) for each in _of_stage(index, stage, own)]


def _of_stage(index: ScheduleIndex, stage: int, versions: Ints) -> Iterator[UpdateBoundary]:
    """The ends of the rounds of a stage, whose microbatches read these ``versions``."""
    schedule = index.schedule
    assert schedule.stream is not None
    count = schedule.stream.microbatches_per_update(stage, replica_counts(schedule.placement))
    begins, ends = (of[_GRADIENTS, stage].max(axis=0) for of in (index.firsts, index.lasts))
    forwards = index.firsts[PHASE_CODE[Phase.FORWARD], stage]
    for version, first in enumerate(range(0, schedule.num_microbatches, count), start=1):
        own, following = (slice(start, start + count) for start in (first, first + count))
        reading = slice(*np.searchsorted(versions, [version, version + 1]).tolist())
        yield UpdateBoundary(
            stage,
            first,
            version,
            _by_rank(index, stage, own, ends, max),
            _by_rank(index, stage, following, begins, min),
            _by_rank(index, stage, following, ends, max),
            _by_rank(index, stage, reading, forwards, min),
        )


def _by_rank(
    index: ScheduleIndex, stage: int, microbatches: slice, positions: Ints, choose: Callable[[int, int], int]
) -> dict[int, int]:
    """The first or last of the ``positions`` of these microbatches on each rank that runs some."""
    chosen: dict[int, int] = {}
    ranks = index.ranks[stage, microbatches].tolist()
    for rank, position in zip(ranks, positions[microbatches].tolist(), strict=True):
        chosen[rank] = choose(chosen.get(rank, position), position)
    return chosen


def version_reads(index: ScheduleIndex, ends: Sequence[UpdateBoundary]) -> tuple[Ints, Ints]:
    """Computes that wait for the sum of a round, each with a compute of another rank that adds to it.

    The waiting computes read the new version, or make the gradients of the next round.
    """
    pairs = [
        (index.first_tasks[rank] + reader - 1, index.first_tasks[other] + made - 1)
        for each in ends
        for waiting in (each.following, each.readers)
        for rank, reader in waiting.items()
        for other, made in each.ready.items()
        if other != rank
    ]
    readers, producers = np.array(pairs, np.int32).reshape(-1, 2).T
    return readers, producers


def round_collectives(
    schedule: Schedule, ends: Sequence[UpdateBoundary], times: Sequence[Floats], sync_spec: SyncSpec
) -> tuple[list[tuple[float, SyncOp]], list[SyncOp]]:
    """The sums of all rounds, each with the time at which the last rank has made its gradients; and updates.

    The sums include updates of replicas for which no compute waits. ``times[rank]`` has the ends of the
    positions of a rank in the unit order.
    """
    sums: list[tuple[float, SyncOp]] = []
    updates: list[SyncOp] = []
    for each in ends:
        ranks = schedule.placement[each.stage]
        over = max(float(times[rank][position]) for rank, position in each.ready.items())
        reached = {rank: int(np.searchsorted(times[rank], over, "right")) for rank in ranks}
        for number in sync_spec.buckets_of(each.stage):
            sums.append((over, SyncOp(Op.REDUCE_GRAD, reached, each.stage, number, each.first)))
        for rank in ranks:
            awaiting = [of[rank] for of in (each.readers, each.next_ready) if rank in of]
            if len(ranks) == 1:
                awaiting = [each.ready[rank] + 1]
            position = min(awaiting, default=reached[rank])
            update = SyncOp(Op.UPDATE, {rank: position}, each.stage, -1, each.first, each.version)
            if awaiting:
                updates.append(update)
            else:
                sums.append((over, update))
    return sorted(sums, key=lambda pair: pair[0]), updates
