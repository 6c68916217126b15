"""Collectives and updates: their positions in the program of each rank.

All ranks of a collective start it, and none passes it before the last one has reached it. So all collectives
of a step are sorted by the time in the unit order of ``lower`` at which the last of their ranks is ready, and
each is placed before the compute that its rank runs at that time. A rank therefore only waits for
instructions before it in one order over all ranks, and any two ranks start their common collectives in the
same order.

Sharded parameters are gathered before the forwards of their stage and again before its backwards, and freed
afterwards: one compute ahead or, if their shards are in host memory, when the use of weights before begins.
If the second gathering would begin before the forwards of some replica have ended, they stay from the first
forward to the last backward.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipec.ir import GRADIENT_PHASES, Bucket, Mode, Op, Payload, Phase, Plan, SyncSpec
from pipec.ir.columns import PHASES, Floats, Ints
from pipec.programs.schedule_index import ScheduleIndex
from pipec.programs.tail_order import num_forwards

_GRADIENTS = [PHASES.index(phase) for phase in GRADIENT_PHASES]
_BACKWARDS = [PHASES.index(phase) for phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT)]
_FORWARD = [PHASES.index(Phase.FORWARD)]


@dataclass(frozen=True)
class SyncOp:
    """An op of one or several ranks, and its position on each of them: that of the compute after it.

    In an asynchronous schedule it belongs to the round that begins with ``microbatch``, and an update makes
    ``version``.
    """

    op: Op
    positions: dict[int, int]
    stage: int = -1
    bucket: int = -1
    microbatch: int = -1
    version: int = -1


@dataclass(frozen=True)
class SyncOrder:
    """The computes and times that decide where the collectives and updates of a plan are placed.

    ``ends[rank]`` has the time at which each position of a rank ends, from the start of its program to its
    end, as in the unit order.
    """

    index: ScheduleIndex
    ends: Sequence[Floats]
    plan: Plan

    @property
    def sync_spec(self) -> SyncSpec:
        return self.plan.sync_spec

    def all(self) -> list[SyncOp]:
        """Every collective and update, in the order in which the ranks reach them."""
        timed = [
            *self._counts(),
            *self._tail(),
            *self._averages(),
            *self._reduces(),
            *self._norm(),
            *self._updates(),
            *self._gathers(),
        ]
        return [sync_op for _, sync_op in sorted(timed, key=lambda pair: pair[0])]

    def _counts(self) -> Iterator[tuple[float, SyncOp]]:
        for stage in self.sync_spec.count_stages:
            yield self._collective(Op.SUM_COUNTS, dict.fromkeys(self._ranks(stage), 0), stage)

    def _tail(self) -> Iterator[tuple[float, SyncOp]]:
        """The tail, behind the last forward of each replica; first they gather each other's rows."""
        if (stage := self.plan.tail_stage) is None:
            return
        ready = self._last(stage, _FORWARD)
        for op in (Op.GATHER_ROWS, Op.TAIL) if len(ready) > 1 else (Op.TAIL,):
            time, found = self._collective(op, ready, stage)
            before_end = {rank: min(reached, self._end(rank)) for rank, reached in found.positions.items()}
            yield time, SyncOp(op, before_end, stage)

    def _averages(self) -> Iterator[tuple[float, SyncOp]]:
        for stage in self.sync_spec.buffer_sync_stages:
            ready = self._last(stage, _FORWARD)
            yield self._collective(Op.AVERAGE_BUFFERS, ready, stage)

    def _reduces(self) -> Iterator[tuple[float, SyncOp]]:
        for number, bucket in enumerate(self.sync_spec.buckets):
            op = Op.STORE if bucket.on_host else Op.REDUCE_GRAD
            for ready in self._rounds(bucket) if bucket.trained else ():
                yield self._collective(op, ready, bucket.stage, number)

    def _rounds(self, bucket: Bucket) -> Iterator[dict[int, int]]:
        """By rank, the positions after which gradients of a bucket are complete: of each round, or of all."""
        if not self.sync_spec.reduces_every_round(bucket):
            yield self._ready(bucket)
            return
        replicas = len(self._ranks(bucket.stage))
        for over in range(replicas, self.index.schedule.num_microbatches + replicas, replicas):
            yield self._complete(bucket, over)

    def _norm(self) -> Iterator[tuple[float, SyncOp]]:
        if self.sync_spec.has_grad_norm:
            yield self._collective(Op.GRAD_NORM, self._ends)
            if self.sync_spec.may_skip_step:
                yield self._collective(Op.CHECK, self._ends)

    def _updates(self) -> Iterator[tuple[float, SyncOp]]:
        for stage in range(self.index.schedule.num_stages if self.sync_spec.updates else 0):
            ready = self._last(stage, _GRADIENTS)
            if self.sync_spec.has_grad_norm or self._with_remote_gradients(stage):
                ready = {rank: self._end(rank) for rank in ready}
            buckets = [self.sync_spec.buckets[number] for number in self.sync_spec.buckets_of(stage)]
            buckets = [bucket for bucket in buckets if bucket.trained]
            op = Op.HOST_UPDATE if any(map(self.sync_spec.is_in_host_memory, buckets)) else Op.UPDATE
            if op is Op.HOST_UPDATE:
                ready = {rank: self._behind_next_use(rank, last) for rank, last in ready.items()}
            reduced = [self._time(ready) for bucket in buckets for ready in self._rounds(bucket)]
            reduced += [self._time(self._ends)] if self.sync_spec.has_grad_norm else []
            for rank, position in ready.items():
                time = max([float(self.ends[rank][position]), *reduced])
                yield time, self._at(time, op, [rank], stage)

    def _gathers(self) -> Iterator[tuple[float, SyncOp]]:
        buckets = [*enumerate(self.sync_spec.buckets)]
        loads = [each for number, bucket in buckets if bucket.on_host for each in self._loads(number, bucket)]
        yield from ((time, load) for _, time, load in sorted(loads, key=lambda each: each[0]))
        for number, bucket in buckets:
            if bucket.on_host:
                continue
            if self.sync_spec.reshards_after_use(bucket):
                yield from self._around_uses(number, bucket)
            elif self.sync_spec.shard and self.sync_spec.updates:
                last = {rank: self._end(rank) + 2 for rank in self._ranks(bucket.stage)}
                yield float("inf"), SyncOp(Op.UNSHARD, last, bucket.stage, number)

    def _around_uses(self, number: int, bucket: Bucket) -> Iterator[tuple[float, SyncOp]]:
        """Gather a bucket ahead of its first use, and free it after the last one.

        What is in host memory is gathered when the use before begins, as if it was loaded.
        """
        spans = list[tuple[float, dict[int, int], dict[int, int]]]()
        for firsts, lasts in self._uses(bucket.stage):
            time = self._ahead_of(firsts)
            if self.sync_spec.is_in_host_memory(bucket):
                begins = {rank: self._use_before(rank, first) for rank, first in firsts.items()}
                time = min(float(self.ends[rank][max(begin - 1, 0)]) for rank, begin in begins.items())
            positions = self._at(time, Op.UNSHARD, firsts).positions
            if self.plan.mode is Mode.OUTPUTS:  # no collective runs during the pause
                forwards = {rank: num_forwards(self.index, rank) for rank in firsts}
                positions |= {
                    rank: max(positions[rank], count + 1)
                    for rank, count in forwards.items()
                    if firsts[rank] > count
                }
            if spans and any(position <= spans[-1][2][rank] for rank, position in positions.items()):
                time, positions, _ = spans.pop()
            spans.append((time, positions, lasts))
        for time, positions, lasts in spans:
            yield time, SyncOp(Op.UNSHARD, positions, bucket.stage, number)
            for rank, last in lasts.items():
                yield self._time(lasts), SyncOp(Op.RESHARD, {rank: last}, bucket.stage, number)

    def _uses(self, stage: int) -> list[tuple[dict[int, int], dict[int, int]]]:
        """The first and last positions, by rank, between which the parameters of a stage are gathered."""
        forwards = self._first(stage, _FORWARD), self._last(stage, _FORWARD)
        tail = self.plan.stages[stage].tail
        has_tail = tail is not None and bool(tail.parameters)
        if not self.plan.mode.trains:
            return [(forwards[0], {rank: last + has_tail for rank, last in forwards[1].items()})]
        backwards = self._first(stage, _BACKWARDS), self._last(stage, [*_BACKWARDS, *_GRADIENTS])
        again = self._at(self._ahead_of(backwards[0]), Op.UNSHARD, backwards[0]).positions
        if self.plan.mode is Mode.OUTPUTS:
            return [forwards, backwards]
        if not has_tail and all(again[rank] > last for rank, last in forwards[1].items()):
            return [forwards, backwards]
        return [(forwards[0], backwards[1])]

    def _loads(self, number: int, bucket: Bucket) -> Iterator[tuple[int, float, SyncOp]]:
        """Load a bucket when the use before begins, and free it after its last use; with the first use.

        So a rank has the stage that runs and the next one. Tied weights, which are sent when the program
        begins, stay; what a pause interrupts is loaded again.
        """
        stays = bucket.is_tied and self.plan.mode is not Mode.OUTPUTS
        for rank in self._ranks(bucket.stage):
            spans = list[tuple[int, int, int]]()
            for firsts, lasts in self._uses(bucket.stage):
                begin = self._use_before(rank, firsts[rank])
                if not spans:
                    spans.append((firsts[rank], 0 if bucket.is_tied else begin, lasts[rank]))
                elif stays or begin <= spans[-1][2]:
                    spans[-1] = *spans[-1][:2], lasts[rank]
                else:
                    spans.append((firsts[rank], begin, lasts[rank]))
            for first, begin, last in spans:
                for op, position, time in ((Op.LOAD, begin, max(begin - 1, 0)), (Op.RESHARD, last, last)):
                    placed = SyncOp(op, {rank: position}, bucket.stage, number)
                    yield first, float(self.ends[rank][time]), placed

    def _use_before(self, rank: int, first: int) -> int:
        """Where the use before the one that begins at ``first`` begins; behind the pause of a step."""
        before = max((begin for begin, _ in self._loaded[rank] if begin < first), default=min(first, 1))
        forwards = num_forwards(self.index, rank) if self.plan.mode is Mode.OUTPUTS else first
        return max(before, forwards + 1) if first > forwards else before

    def _behind_next_use(self, rank: int, last: int) -> int:
        """Where the use after ``last`` ends, or the program of the rank."""
        return min((use for use in self._loaded[rank] if use[0] > last), default=(0, self._end(rank)))[1]

    @cached_property
    def _loaded(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """By rank, the first and last positions of each use of weights that are in host memory."""
        found = defaultdict[int, list[tuple[int, int]]](list)
        buckets = filter(self.sync_spec.is_in_host_memory, self.sync_spec.buckets)
        for stage in dict.fromkeys(bucket.stage for bucket in buckets):
            for firsts, lasts in self._uses(stage):
                for rank in self._ranks(stage):
                    found[rank].append((firsts[rank], lasts[rank]))
        return found

    def _ahead_of(self, firsts: Mapping[int, int]) -> float:
        """The time one compute before the first of these computes of several ranks."""
        return min(float(self.ends[rank][max(first - 2, 0)]) for rank, first in firsts.items())

    def _collective(
        self, op: Op, ready: Mapping[int, int], stage: int = -1, bucket: int = -1
    ) -> tuple[float, SyncOp]:
        """The collective of ranks at the time when all have reached their positions ``ready``."""
        time = self._time(ready)
        return time, self._at(time, op, ready, stage, bucket)

    def _time(self, ready: Mapping[int, int]) -> float:
        return max(float(self.ends[rank][position]) for rank, position in ready.items())

    def _at(self, time: float, op: Op, ranks: Iterable[int], stage: int = -1, bucket: int = -1) -> SyncOp:
        reached = {rank: int(np.searchsorted(self.ends[rank], time, "right")) for rank in ranks}
        return SyncOp(op, reached, stage, bucket)

    def _ready(self, bucket: Bucket) -> dict[int, int]:
        """By rank, the position after which the gradients of a bucket are complete."""
        if bucket.is_tied:
            return {rank: self._end(rank) for rank in self._ranks(bucket.stage)}
        return self._complete(bucket)

    def _complete(self, bucket: Bucket, before: int | None = None) -> dict[int, int]:
        """By rank, the position of the segment of the last backward that completes a bucket."""
        found = self._last(bucket.stage, _GRADIENTS, before)
        segments = {rank: int(self.index.segments[rank][last - 1]) for rank, last in found.items()}
        return {rank: last - max(segments[rank] - bucket.segment, 0) for rank, last in found.items()}

    def _ranks(self, stage: int) -> tuple[int, ...]:
        return self.index.schedule.placement[stage]

    @property
    def _ends(self) -> dict[int, int]:
        """By rank, the position after its last compute."""
        return {rank: self._end(rank) for rank in range(len(self.ends))}

    def _end(self, rank: int) -> int:
        """The position after the last compute of a rank."""
        return len(self.ends[rank]) - 1

    def _with_remote_gradients(self, stage: int) -> set[str]:
        """The parameters whose gradients other stages send after the last computes of their ranks."""
        links = (link for link in self.plan.links if link.payload is Payload.WEIGHT_GRADIENT)
        return {value.name for link in links if link.target == stage for value in link.values}

    def _first(self, stage: int, phases: Sequence[int]) -> dict[int, int]:
        own = self._own(self.index.firsts, stage, phases)
        return {rank: int(positions[positions > 0].min()) for rank, positions in own}

    def _last(self, stage: int, phases: Sequence[int], before: int | None = None) -> dict[int, int]:
        """By rank, the last position; only of microbatches below ``before`` if it is given."""
        own = self._own(self.index.lasts, stage, phases, before)
        return {rank: int(positions.max()) for rank, positions in own}

    def _own(
        self, positions: Ints, stage: int, phases: Sequence[int], before: int | None = None
    ) -> Iterator[tuple[int, Ints]]:
        """The ``positions`` of these phases of a stage on each of its ranks; 0 means none."""
        of_stage = positions[phases, stage, :before]
        for rank in self._ranks(stage):
            yield rank, of_stage[:, self.index.ranks[stage][:before] == rank]
