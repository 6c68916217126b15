"""Links the gradient sync of a step: collectives of replicas, and updates."""

import functools
from collections.abc import Callable, Mapping

from torch import Tensor

from pipec.ir import Instruction, Op
from pipec.runtime.messages.collective_group import CollectiveGroup
from pipec.runtime.optimizers import sum_of_squares
from pipec.runtime.stages.bound_stage import BoundStage
from pipec.runtime.stages.flat_bucket import FlatBucket, reduction_dtype, undivided
from pipec.runtime.stages.replica_reductions import BufferAverage, no_rows, sum_of_rows
from pipec.runtime.step.linked_instruction import Action, nothing
from pipec.runtime.step.non_finite import require_finite
from pipec.runtime.step.optimizer_updates import StageUpdate
from pipec.runtime.step.overflow_check import follow_table, norm_table, parameter_order
from pipec.runtime.step.rank_state import RankState

StartAndEnd = tuple[Action, Action]
"""The action that starts something, and the one that waits for its end."""


class SyncLinker:
    """Makes the actions of a program's collectives and updates."""

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self._buckets: dict[int, FlatBucket] = {}
        self.starts: Mapping[Op, Callable[[Instruction], StartAndEnd]] = {
            Op.SUM_COUNTS: self._sum_counts,
            Op.GATHER_ROWS: self._gather_rows,
            Op.REDUCE_GRAD: self._reduce,
            Op.AVERAGE_BUFFERS: self._average,
            Op.UNSHARD: self._unshard,
        }
        self.calls: Mapping[Op, Callable[[Instruction], Action]] = {
            Op.GRAD_NORM: self._norm,
            Op.STAGE_NORM: self._stage_norm,
            Op.CHECK: self._check,
            Op.STASH: self._stash,
            Op.UPDATE: self._update,
            Op.PAUSE: lambda instruction: nothing,
            Op.RESHARD: self._reshard,
        }

    def _sum_counts(self, instruction: Instruction) -> StartAndEnd:
        rank, stage = self._rank, self._rank.stages[instruction.stage]
        counts, group = rank.counts[stage.index], self._group(stage.index)
        own = rank.plan.microbatches_on(stage.index, rank.number)

        def finish() -> None:
            sums = counts.finish()
            for microbatch in own:
                if rank.sizes[microbatch]:
                    stage.frames[microbatch].update(sums)
            if stage.index in rank.tails:
                rank.tails[stage.index].frame.update(sums)

        return functools.partial(counts.start, group), finish

    def _gather_rows(self, instruction: Instruction) -> StartAndEnd:
        tail, group = self._rank.tails[instruction.stage], self._group(instruction.stage)
        return functools.partial(tail.start_gather, group), tail.finish_gather

    def _reduce(self, instruction: Instruction) -> StartAndEnd:
        """Reduce the gradients of a bucket, and add sums that are whole to ``.grad``."""
        stage = self._rank.stages[instruction.stage]
        bucket = self._rank.plan.sync_spec.buckets[instruction.bucket]
        indices = {name: stage.code.PARAMETERS.index(name) for name in bucket.names}
        group = self._group(stage.index)
        flat = self._shard(instruction) or self._whole(instruction.bucket, stage, indices)
        sparse = dict[str, Tensor]()

        def start() -> None:
            totals = {name: stage.gradients.pop(index) for name, index in indices.items()}
            if not bucket.sparse:
                flat.start_reduce(totals, group)
                return
            for name, rows in totals.items():  # synchronously
                own = no_rows(stage.weights[indices[name]]) if rows is None else rows
                sparse[name] = sum_of_rows(own, group)

        def finish() -> None:
            sums = {**sparse, **flat.finish_reduce()}
            sparse.clear()
            for name, total in sums.items() if stage.keeps_gradients else ():
                index = indices[name]
                stage.gradients.add_reduced(index, total.to(stage.weights[index].dtype))

        return start, finish

    def _whole(self, number: int, stage: BoundStage, indices: Mapping[str, int]) -> FlatBucket:
        """The flat memory of a bucket that is not sharded."""
        if number not in self._buckets:
            weights = {name: stage.weights[index] for name, index in indices.items()}
            sync_spec, own = self._rank.plan.sync_spec, next(iter(weights.values())).dtype
            dtype = reduction_dtype(sync_spec.gradient_dtype, own)
            self._buckets[number] = FlatBucket(undivided(weights), 0, weights, stage.device, dtype)
            if dtype is own and not sync_spec.buckets[number].sparse:
                names = {index: name for name, index in indices.items()}
                stage.gradients.accumulate_in(self._buckets[number], names)
        return self._buckets[number]

    def _average(self, instruction: Instruction) -> StartAndEnd:
        rank, stage = self._rank, self._rank.stages[instruction.stage]
        replicas = rank.plan.placement[stage.index]
        own = [rank.plan.microbatches_on(stage.index, each) for each in replicas]
        number = replicas.index(rank.number)

        def shares() -> tuple[float, bool]:
            *sizes, _ = rank.sizes
            counts = [sum(sizes[each] > 0 for each in microbatches) for microbatches in own]
            return counts[number] / sum(counts), not any(counts[:number]) and counts[number] > 0

        names = rank.plan.stages[stage.index].averaged_buffers
        average = BufferAverage(stage, self._group(stage.index), shares, names)
        return average.start, average.finish

    def _norm(self, instruction: Instruction) -> Action:
        """Sum the squares of the norms for every update to come, and tell all ranks what is not finite.

        Each parameter's is summed over the ranks first, and then those of all in the model's order. So the
        bits of the sum do not depend on which ranks have which parameters.
        """
        rank, update_state = self._rank, self._rank.update_state
        group = rank.transport.group(range(rank.plan.num_ranks))
        device = next(iter(rank.stages.values())).device
        updates, num_names = update_state.updates, len(parameter_order(rank))

        def norm() -> None:
            update_state.table = norm_table(rank, device)
            group.all_reduce(update_state.table)()
            if updates is not None and updates.max_norm is not None:
                squares = update_state.table[:num_names].sum()
                updates.grad_norm, update_state.factor = squares.sqrt(), updates.factor(squares)

        return norm

    def _check(self, instruction: Instruction) -> Action:
        """Decide whether the step is skipped; in a stream, whether a mini-batch is."""
        rank, update_state, number = self._rank, self._rank.update_state, instruction.stage
        if number < 0:

            def check() -> None:
                assert update_state.table is not None, "the norm comes first"
                follow_table(rank, update_state.table)

            return check
        results, versions = rank.stream_results, rank.stages[number].versions
        update = self._stage_update(number)

        def check_batch() -> None:
            update_state.skipped.discard(number)
            if not results.is_finite(versions.number):
                update_state.skipped.add(number)
            elif update is not None:
                require_finite(update.norm_gradients)

        return check_batch

    def _stage_norm(self, instruction: Instruction) -> Action:
        """Compute the factor by which the next update of a stage of a stream is clipped."""
        update_state, update = self._rank.update_state, self._stage_update(instruction.stage)
        updates = update_state.updates
        assert updates is not None, "a program that updates has an optimizer"

        def norm() -> None:
            if update is not None:
                update_state.factor = updates.factor(sum_of_squares(update.norm_gradients.values()))

        return norm

    def _stash(self, instruction: Instruction) -> Action:
        """Keep the weights of a stage that its next update changes."""
        stage, skipped = self._rank.stages[instruction.stage], self._rank.update_state.skipped

        def stash() -> None:
            changes = stage.index not in skipped
            stage.versions.stash(
                [i for i, weight in enumerate(stage.weights) if changes and weight.grad is not None]
            )

        return stash

    def _update(self, instruction: Instruction) -> Action:
        update_state, stage = self._rank.update_state, self._rank.stages[instruction.stage]
        update = self._stage_update(instruction.stage)
        if instruction.version >= 0:
            return self._update_version(stage, update)
        if update is None:  # another replica makes it
            return nothing

        def act() -> None:
            update_state.begun.add(stage.index)
            update.update(update_state.factor)
            stage.gradients.clear_updated()

        return self._unless_skipped(act)

    def _update_version(self, stage: BoundStage, update: StageUpdate | None) -> Action:
        """Make the next version of a stage; if its mini-batch is skipped, it equals the last one."""
        update_state = self._rank.update_state

        def act() -> None:
            is_skipped = stage.index in update_state.skipped
            if update is not None:
                if is_skipped:
                    update.drop_gradients()
                else:
                    stage.versions.begin_update()
                    update.update(update_state.factor, update_state.groups)
                stage.gradients.clear_updated()
            stage.advance(keeps_buffers=is_skipped)

        return act

    def _unshard(self, instruction: Instruction) -> StartAndEnd:
        """Gather slices; parameters that are not kept whole are put where the stage's functions find them."""
        stage, shard = self._rank.stages[instruction.stage], self._shard(instruction)
        if shard is None:  # of an evaluation with whole parameters
            return nothing, nothing
        bucket = self._rank.plan.sync_spec.buckets[instruction.bucket]
        group = self._group(stage.index)
        start = functools.partial(shard.start_gather, group)
        if self._rank.plan.sync_spec.reshards_after_use(bucket):
            return start, functools.partial(_set_gathered, shard, stage)

        def finish() -> None:
            shard.finish_gather()

        return self._unless_skipped(start), self._unless_skipped(finish)

    def _reshard(self, instruction: Instruction) -> Action:
        stage, shard = self._rank.stages[instruction.stage], self._shard(instruction)
        if shard is None:
            return nothing

        def reshard() -> None:
            shard.drop()
            if not shard.keeps_parameters:
                stage.clear_weights(shard.sharding.names)

        return reshard

    def _shard(self, instruction: Instruction) -> FlatBucket | None:
        """This rank's shard of a bucket; None if gradients, or parameters of an evaluation, are whole."""
        update, op = self._stage_update(instruction.stage), instruction.op
        shard = update.shards.get(instruction.bucket) if update else None
        is_whole = op is Op.REDUCE_GRAD or self._rank.plan.sync_spec.only_gathers
        assert shard or is_whole, "a program that gathers parameters has shards"
        return shard

    def _stage_update(self, stage: int) -> StageUpdate | None:
        """What this rank updates of a stage."""
        updates = self._rank.update_state.updates
        return updates.on(self._rank.number, stage) if updates else None

    def _group(self, stage: int) -> CollectiveGroup:
        return self._rank.transport.group(self._rank.plan.placement[stage])

    def _unless_skipped(self, action: Action) -> Action:
        """The action, left out if the check before it has found a value that is not finite."""
        update_state = self._rank.update_state

        def act() -> None:
            if update_state.non_finite is None:
                action()

        return act


def _set_gathered(shard: FlatBucket, stage: BoundStage) -> None:
    gathered = shard.finish_gather()
    if not shard.keeps_parameters:
        stage.set_weights({name: x for name, x in gathered.items() if name in stage.code.PARAMETERS})
