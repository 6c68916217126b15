"""Links the gradient sync of a step: collectives of replicas, and updates.

A collective starts at its instruction. The first reader of its result waits for it; results without a reader
in the program are waited for at its end.
"""

import functools

import torch

from pipec.ir import Bucket, Instruction, Op, OpKind
from pipec.runtime.messages.collective_group import CollectiveGroup
from pipec.runtime.optimizers import sum_of_squares
from pipec.runtime.stages.bound_stage import BoundStage
from pipec.runtime.stages.bucket_shard import BucketShard
from pipec.runtime.stages.replica_reductions import BufferAverage, GradientReduction
from pipec.runtime.step.compute import Action
from pipec.runtime.step.non_finite import require_finite
from pipec.runtime.step.optimizer_updates import StageUpdate
from pipec.runtime.step.overflow_check import OverflowCheck, norms_of_rank, parameter_order
from pipec.runtime.step.rank_state import PendingValue, RankState
from pipec.runtime.step.stream_results import StreamResults

PendingWaits = list[tuple[Instruction, Action]]


class SyncLinker:
    """Makes the actions of a program's collectives and updates, one after the other."""

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self._awaited: list[tuple[Instruction, PendingValue]] = []
        self._num_collectives = 0
        self._reductions: dict[int, GradientReduction] = {}

    def expect_tied_gradient(self, instruction: Instruction, pending: PendingValue) -> None:
        """Note that another stage's gradients of a tied weight are in transit."""
        self._awaited.append((instruction, pending))

    def unfinished(self) -> PendingWaits:
        """The waits at the end of the program, each with the instruction that started it."""
        return [(instruction, action) for instruction, each in self._awaited for action in each.pop_waits()]

    def unshard_waits(self, stage: int) -> list[Action]:
        """The waits before the parameters of a stage can be read."""
        return self._waits(Op.UNSHARD, stage)

    def link(self, instruction: Instruction) -> Action:
        self._num_collectives += instruction.op.traits.kind is OpKind.COLLECTIVE
        match instruction.op:
            case Op.REDUCE_GRAD:
                return self._reduce(instruction)
            case Op.AVERAGE_BUFFERS:
                return self._average(instruction)
            case Op.GRAD_NORM:
                return self._norm()
            case Op.UPDATE if instruction.version >= 0:
                return self._update_version(instruction.stage)
            case Op.UPDATE:
                return self._update(instruction.stage)
            case Op.UNSHARD:
                return self._unshard(instruction)
            case Op.RESHARD:
                return self._reshard(instruction)
        raise AssertionError(f"the linker makes no call for {instruction.op}")

    def _reduce(self, instruction: Instruction) -> Action:
        stage, bucket = (
            self._rank.stages[instruction.stage],
            self._rank.plan.sync_spec.buckets[instruction.bucket],
        )
        waits, group = self._tied_gradient_waits(stage.index, bucket), self._group(stage.index, bucket)
        shard = self._shard(instruction)
        if shard is None:
            if instruction.bucket not in self._reductions:
                dtype = self._rank.plan.sync_spec.gradient_dtype
                self._reductions[instruction.bucket] = GradientReduction(stage, bucket, group, dtype)
            reduction = self._reductions[instruction.bucket]
            start, finish = reduction.start, reduction.finish
        else:
            start = functools.partial(_start_scatter, shard, stage, bucket, group)
            finish = shard.finish_reduce
        self._await(instruction, finish)
        return self._after(waits, start)

    def _average(self, instruction: Instruction) -> Action:
        rank, stage = self._rank, self._rank.stages[instruction.stage]
        own = rank.plan.microbatches_on(stage.index, rank.number)

        def share() -> float:
            *sizes, _ = rank.sizes
            return sum(sizes[each] > 0 for each in own) / sum(size > 0 for size in sizes)

        average = BufferAverage(stage, self._group(stage.index), share)
        self._await(instruction, average.finish)
        return average.start

    def _norm(self) -> Action:
        """Sum the squares of the norms for every update to come, and see whether all losses are numbers.

        Each parameter's is summed over the ranks first, and then those of all in the model's order. So the
        bits of the sum do not depend on which ranks have which parameters.
        """
        rank, group = self._rank, self._rank.transport.group(range(self._rank.plan.num_ranks))
        waits = [wait for stage in rank.stages for wait in self._gradients_of(stage)]
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

        return self._after(waits, norm if overflow_check else self._if_updating(norm))

    def _update(self, stage: int) -> Action:
        update_state = self._rank.update_state
        assert update_state.updates is not None, "a program that updates has an optimizer"
        update, waits = update_state.updates.on(self._rank.number, stage), self._gradients_of(stage)
        if update is None:
            return self._after(waits, _nothing)

        gradients = self._rank.stages[stage].gradients

        def act() -> None:
            update_state.begun.add(stage)
            update.update(update_state.factor)
            gradients.clear_updated()

        return self._after(waits, self._if_updating(act))

    def _update_version(self, number: int) -> Action:
        """Update a stage of a stream, and clip by the norm of its own gradients."""
        update_state, stage = self._rank.update_state, self._rank.stages[number]
        updates, versions, stream_results = update_state.updates, stage.versions, self._rank.results
        assert updates is not None, "a program that updates has an optimizer"
        assert isinstance(stream_results, StreamResults), "a stream has results of microbatches"
        update, waits = updates.on(self._rank.number, number), self._gradients_of(number)
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

        return self._after(waits, act)

    def _unshard(self, instruction: Instruction) -> Action:
        """Gather slices; parameters that are not kept whole are put where the stage's functions find them."""
        stage, shard = self._rank.stages[instruction.stage], self._shard(instruction)
        assert shard is not None, "a program that gathers has shares"
        bucket = self._rank.plan.sync_spec.buckets[instruction.bucket]
        group = self._group(stage.index, bucket)
        if not self._rank.plan.sync_spec.reshards_after_use(bucket):
            finish = self._if_updating(lambda: _ignore(shard.finish_gather()))
            self._await(instruction, finish)
            return self._if_updating(lambda: shard.start_gather(group))
        self._await(instruction, functools.partial(_show_gathered, shard, stage))
        return lambda: shard.start_gather(group)

    def _reshard(self, instruction: Instruction) -> Action:
        stage, shard = self._rank.stages[instruction.stage], self._shard(instruction)
        assert shard is not None, "a program that lets go of parameters has shares"

        def reshard() -> None:
            shard.drop()
            if not shard.keeps_parameters:
                stage.clear_weights(shard.sharding.names)

        return self._after(self.unshard_waits(stage.index), reshard)

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

    def _gradients_of(self, stage: int) -> list[Action]:
        """The waits before the gradients of a stage are complete and reduced."""
        return [*self._waits(Op.RECV, stage), *self._waits(Op.REDUCE_GRAD, stage)]

    def _tied_gradient_waits(self, stage: int, bucket: Bucket) -> list[Action]:
        """The waits before a bucket has the gradients of every stage that uses it."""
        return [
            action
            for begun, each in self._awaited
            if begun.op is Op.RECV and begun.stage == stage and begun.link
            if not {value.name for value in begun.link.values}.isdisjoint(bucket.names)
            for action in each.pop_waits()
        ]

    def _await(self, instruction: Instruction, finish: Action) -> None:
        """Note the wait for the current collective, for its first reader to run."""
        self._awaited.append((instruction, PendingValue(self._noted(finish))))

    def model_collective(self, finish: Action) -> PendingValue:
        """The result of the program's next model collective, of a microbatch."""
        self._num_collectives += 1
        return PendingValue(self._noted(finish))

    def _noted(self, finish: Action) -> Action:
        """Wait for the current collective, and note when it was over."""
        over, clock, number = self._rank.over, self._rank.clock, self._num_collectives - 1

        def wait() -> None:
            finish()
            over[number] = clock.now()

        return wait

    def _after(self, waits: list[Action], action: Action) -> Action:
        if not waits:
            return action

        def act() -> None:
            for wait in waits:
                wait()
            self._rank.clock.note_arrival()
            action()

        return act

    def _waits(self, op: Op, stage: int) -> list[Action]:
        """The waits that instructions of a stage have started and that nobody has run yet."""
        started = [each for begun, each in self._awaited if begun.op is op and begun.stage == stage]
        return [action for each in started for action in each.pop_waits()]


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
