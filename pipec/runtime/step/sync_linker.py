"""Links the gradient sync of a step: collectives of replicas, and updates."""

import functools
from collections.abc import Callable, Mapping

import torch

from pipec.ir import Bucket, Instruction, Op
from pipec.runtime.messages.collective_group import CollectiveGroup
from pipec.runtime.optimizers import sum_of_squares
from pipec.runtime.stages.bound_stage import BoundStage
from pipec.runtime.stages.bucket_shard import BucketShard
from pipec.runtime.stages.replica_reductions import BufferAverage, GradientReduction
from pipec.runtime.step.compute import Action
from pipec.runtime.step.non_finite import require_finite
from pipec.runtime.step.optimizer_updates import StageUpdate
from pipec.runtime.step.overflow_check import OverflowCheck, norms_of_rank, parameter_order
from pipec.runtime.step.rank_state import RankState
from pipec.runtime.step.stream_results import StreamResults

StartAndEnd = tuple[Action, Action]
"""The action that starts something, and the one that waits for its end."""


class SyncLinker:
    """Makes the actions of a program's collectives and updates."""

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self._reductions: dict[int, GradientReduction] = {}
        self.starts: Mapping[Op, Callable[[Instruction], StartAndEnd]] = {
            Op.REDUCE_GRAD: self._reduce,
            Op.AVERAGE_BUFFERS: self._average,
            Op.UNSHARD: self._unshard,
        }
        self.calls: Mapping[Op, Callable[[Instruction], Action]] = {
            Op.GRAD_NORM: self._norm,
            Op.UPDATE: self._update,
            Op.RESHARD: self._reshard,
        }

    def _reduce(self, instruction: Instruction) -> StartAndEnd:
        stage, bucket = (
            self._rank.stages[instruction.stage],
            self._rank.plan.sync_spec.buckets[instruction.bucket],
        )
        group, shard = self._group(stage.index, bucket), self._shard(instruction)
        if shard is not None:
            return functools.partial(_start_scatter, shard, stage, bucket, group), shard.finish_reduce
        if instruction.bucket not in self._reductions:
            dtype = self._rank.plan.sync_spec.gradient_dtype
            self._reductions[instruction.bucket] = GradientReduction(stage, bucket, group, dtype)
        reduction = self._reductions[instruction.bucket]
        return reduction.start, reduction.finish

    def _average(self, instruction: Instruction) -> StartAndEnd:
        rank, stage = self._rank, self._rank.stages[instruction.stage]
        own = rank.plan.microbatches_on(stage.index, rank.number)

        def share() -> float:
            *sizes, _ = rank.sizes
            return sum(sizes[each] > 0 for each in own) / sum(size > 0 for size in sizes)

        average = BufferAverage(stage, self._group(stage.index), share)
        return average.start, average.finish

    def _norm(self, instruction: Instruction) -> Action:
        """Sum the squares of the norms for every update to come, and see whether all losses are numbers.

        Each parameter's is summed over the ranks first, and then those of all in the model's order. So the
        bits of the sum do not depend on which ranks have which parameters.
        """
        rank, group = self._rank, self._rank.transport.group(range(self._rank.plan.num_ranks))
        device = next(iter(rank.stages.values())).device
        overflow_check = OverflowCheck(rank, group, device) if rank.plan.sync_spec.may_skip_step else None
        updates, names = rank.update_state.updates, parameter_order(rank)

        def norm() -> None:
            table = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)
            if norms := norms_of_rank(rank):
                none = torch.zeros((), dtype=torch.float64, device=device)
                table[:-1] = torch.stack([norms.get(name, none) for name in names]).square_()
            if overflow_check is not None:
                table[-1] = overflow_check.num_nan_losses()
            group.all_reduce(table)()
            total = table[:-1].sum()
            if updates is not None and updates.max_norm is not None:
                rank.update_state.factor = updates.factor(total)
            if overflow_check is not None:
                overflow_check.follow(*torch.stack([total, table[-1]]).tolist())

        return norm if overflow_check else self._if_updating(norm)

    def _update(self, instruction: Instruction) -> Action:
        update_state, stage = self._rank.update_state, instruction.stage
        assert update_state.updates is not None, "a program that updates has an optimizer"
        if instruction.version >= 0:
            return self._update_version(stage)
        update = update_state.updates.on(self._rank.number, stage)
        if update is None:
            return _nothing

        gradients = self._rank.stages[stage].gradients

        def act() -> None:
            update_state.begun.add(stage)
            update.update(update_state.factor)
            gradients.clear_updated()

        return self._if_updating(act)

    def _update_version(self, number: int) -> Action:
        """Update a stage of a stream, and clip by the norm of its own gradients."""
        update_state, stage = self._rank.update_state, self._rank.stages[number]
        updates, versions, stream_results = update_state.updates, stage.versions, self._rank.results
        assert updates is not None, "a program that updates has an optimizer"
        assert isinstance(stream_results, StreamResults), "a stream has results of microbatches"
        update = updates.on(self._rank.number, number)
        looks = self._rank.plan.sync_spec.on_nan is not None

        def act() -> None:
            if not stream_results.is_finite(versions.number):
                _skip_update(stage, update)
                return
            if update is not None and looks:
                require_finite(update.norm_gradients)
            versions.stash([i for i, weight in enumerate(stage.weights) if weight.grad is not None])
            if update is not None:
                clips = updates.max_norm is not None
                factor = updates.factor(sum_of_squares(update.norm_gradients.values())) if clips else None
                update.update(factor, update_state.groups)
                stage.gradients.clear_updated()
            stage.advance()

        return act

    def _unshard(self, instruction: Instruction) -> StartAndEnd:
        """Gather slices; parameters that are not kept whole are put where the stage's functions find them."""
        stage, shard = self._rank.stages[instruction.stage], self._shard(instruction)
        assert shard is not None, "a program that gathers has shares"
        bucket = self._rank.plan.sync_spec.buckets[instruction.bucket]
        group = self._group(stage.index, bucket)
        if not self._rank.plan.sync_spec.reshards_after_use(bucket):
            start, finish = (lambda: shard.start_gather(group)), (lambda: _ignore(shard.finish_gather()))
            return self._if_updating(start), self._if_updating(finish)
        return (lambda: shard.start_gather(group)), functools.partial(_show_gathered, shard, stage)

    def _reshard(self, instruction: Instruction) -> Action:
        stage, shard = self._rank.stages[instruction.stage], self._shard(instruction)
        assert shard is not None, "a program that lets go of parameters has shares"

        def reshard() -> None:
            shard.drop()
            if not shard.keeps_parameters:
                stage.clear_weights(shard.sharding.names)

        return reshard

    def _shard(self, instruction: Instruction) -> BucketShard | None:
        """This rank's shard of a bucket, if it has one."""
        updates = self._rank.update_state.updates
        update = updates.on(self._rank.number, instruction.stage) if updates else None
        return update.shards.get(instruction.bucket) if update else None

    def _group(self, stage: int, bucket: Bucket | None = None) -> CollectiveGroup:
        num_hosts = bucket.num_hosts if bucket else 1
        return self._rank.transport.group(self._rank.plan.placement[stage], num_hosts)

    def _if_updating(self, action: Action) -> Action:
        update_state = self._rank.update_state

        def act() -> None:
            if update_state.now:
                action()

        return act


def _start_scatter(shard: BucketShard, stage: BoundStage, bucket: Bucket, group: CollectiveGroup) -> None:
    indices = {name: stage.code.PARAMETERS.index(name) for name in bucket.names}
    shard.start_reduce({name: stage.gradients.pop(index) for name, index in indices.items()}, group)


def _show_gathered(shard: BucketShard, stage: BoundStage) -> None:
    gathered = shard.finish_gather()
    if not shard.keeps_parameters:
        stage.set_weights(gathered)


def _skip_update(stage: BoundStage, update: StageUpdate | None) -> None:
    """Leave an update of a stream out. The version that it would have made is the one before."""
    if update is not None:
        update.drop_gradients()
        stage.gradients.clear_updated()
    stage.versions.stash(())
    stage.versions.advance()


def _ignore(gathered: object) -> None:
    """Drop views that nobody needs."""


def _nothing() -> None:
    """The update of a rank that leaves it to another replica."""
