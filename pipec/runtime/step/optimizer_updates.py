"""The updates of a program: the parameters that each rank of this process updates, and their gradients."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipec.errors import InputError
from pipec.ir import ParameterShard, Plan, stages_on
from pipec.ir.sharding import shard_evenly, shard_whole_tensors
from pipec.runtime.messages.collective_group import CollectiveGroup
from pipec.runtime.optimizers import (
    Factory,
    GatherStates,
    PipelineOptimizer,
    StageOptimizer,
    clip_factor,
    parameter_on,
    sum_of_squares,
)
from pipec.runtime.stages.flat_bucket import ShardedBucket, ShardGradient
from pipec.runtime.stages.gradients import add_to_grad
from pipec.runtime.step.loss_scale import LossScale
from pipec.runtime.step.non_finite import NonFinite

GroupOf = Callable[[int, int], CollectiveGroup]
"""The replicas of a stage as a rank sees them."""


class OptimizerUpdates:
    """The optimizer of a pipeline, on the ranks of this process.

    ``parameters`` are those of the whole model. ``max_norm`` is what gradients are clipped to, if they are.
    ``loss_scale`` is that of the next step, if the loss is scaled, and ``grad_norm`` the norm that the last
    update was clipped by.
    """

    def __init__(
        self,
        factory: Factory,
        max_norm: float | None,
        parameters: Mapping[str, nn.Parameter],
        loss_scale: LossScale | None = None,
    ) -> None:
        self.loss_scale = loss_scale
        self.optimizer = PipelineOptimizer(factory, parameters)
        self.max_norm = max_norm
        self.grad_norm: Tensor | None = None
        groups = self.optimizer.param_groups
        self._optimized = frozenset(name for group in groups for name in group["param_names"])
        self._like = self.optimizer.dummies
        self._stages: dict[tuple[int, int], StageOptimizer] = {}
        self._bound: Plan | None = None
        self.skip_reasons: dict[int, NonFinite] = {}
        """By rank, why the next update is to be left out, where steps without an update came before it."""

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the parameters of the whole model."""
        return {name: each.shape for name, each in self._like.items()}

    def buckets(self) -> list[tuple[int, int, ShardedBucket]]:
        """The sharded buckets of this process, each with its rank and its stage."""
        updates = self._stages.items() if self._bound is not None else ()
        return [(*where, shard) for where, update in updates for shard in update.shards.values()]

    @property
    def sharded_names(self) -> list[str]:
        """The parameters that are held as shards alone, and are empty until they are gathered."""
        return [name for *_, x in self.buckets() if not x.keeps_parameters for name in x.sharding.names]

    def shards(self) -> dict[ParameterShard, Tensor]:
        """The memory of this process's shards of such parameters."""
        self.follow_script()
        owned = (x.owned().items() for *_, x in self.buckets() if not x.keeps_parameters)
        return {piece: memory for of_bucket in owned for piece, memory in of_bucket}

    def has_gradients(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether there are gradients of this process's ``parameters`` that no update has used."""
        return any(each.grad is not None for name, each in parameters.items() if name in self._optimized)

    def follow_script(self) -> None:
        """Apply the script's changes to sharded parameters and gradients."""
        for rank, stage, shard in self.buckets():
            if shard.follow_script():
                self._stages[rank, stage].move_to(shard.owned())

    def mark_gradients(self) -> None:
        """Show the script which sharded parameters have a gradient."""
        for *_, shard in self.buckets():
            shard.mark_gradients()

    def of(self, parameters: Mapping[str, nn.Parameter]) -> "OptimizerUpdates":
        """The same for a copy of the parameters, with a copy of the state. Every rank calls this."""
        made = OptimizerUpdates(
            self.optimizer.factory, self.max_norm, parameters, copy.deepcopy(self.loss_scale)
        )
        made.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return made

    def on(self, rank: int, stage: int) -> StageOptimizer | None:
        """A rank's update of a stage. Replicas that share parameters leave it to the first one."""
        return self._stages.get((rank, stage))

    def factor(self, squares: Tensor) -> Tensor:
        """The factor for gradients, given the square of their global norm."""
        assert self.max_norm is not None
        return clip_factor(squares, self.max_norm)

    @torch.no_grad()
    def dry_run(self, rank: int, device: torch.device) -> None:
        """Make the updates of a rank with little tensors of the same types, which use the same kernels."""
        for update in [each for (number, _), each in self._stages.items() if number == rank]:
            own = {piece.name: _small_like(self._like[piece.name], device) for piece in update.pieces}
            owned = {ParameterShard(name, 0, x.numel()): x for name, x in own.items()}
            whole = {name: own.get(name, _small_like(like, "meta")) for name, like in self._like.items()}
            gradients = {name: torch.zeros_like(x) for name, x in own.items()}
            squares = sum_of_squares(gradients.values())
            factor = self.factor(squares) if self.max_norm is not None else None
            optimizer = StageOptimizer(self.optimizer, self.optimizer.factory, whole, owned)
            optimizer.update(gradients, factor)

    def is_bound_to(self, plan: Plan) -> bool:
        """Whether the parameters are divided as a plan says."""
        return self._bound is not None and _key(self._bound) == _key(plan)

    def has_sharded(self, plan: Plan) -> bool:
        """Whether the parameters are sharded as the programs of an evaluation gather them."""
        bound, gathered = self._bound, [bucket.names for bucket in plan.sync_spec.buckets]
        return (
            bound is not None
            and bound.placement == plan.placement
            and bound.sync_spec.shard is plan.sync_spec.shard
            and gathered == [bucket.names for bucket in bound.sync_spec.buckets]
        )

    def drop_gradients(self) -> None:
        """Forget all gradients since the last update: a step has failed that has added some of its own."""
        self.skip_reasons.clear()
        for update in self._stages.values():
            update.drop_gradients()
        self.mark_gradients()

    def bind(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        devices: Mapping[int, torch.device],
        is_distributed: bool,
        gather: GatherStates,
        owner_ranks: Mapping[str, Sequence[int]],
    ) -> None:
        """Divide the parameters among those who update them, as the plan says.

        ``devices`` are those of the ranks of this process. Replicas of a stage that share a process share its
        parameters, and the first one updates all of them. In a stream, where they update at different times,
        each but the first has copies. A parameter that the plan does not use may have a gradient from other
        steps: its ``owner_ranks``, or rank 0, update it with the first of their stages.
        """
        self._bound, self._stages, sync_spec = plan, {}, plan.sync_spec
        for stage, placement in enumerate(plan.placement):
            here, used = [rank for rank in placement if rank in devices], plan.stages[stage].parameters
            for rank in here:
                divides = sync_spec.shard and is_distributed and len(placement) > 1
                numbers = sync_spec.buckets_of(stage) if divides else ()
                shards = {
                    number: self._shard(plan, number, rank, parameters, devices[rank]) for number in numbers
                }
                divided = {name for shard in shards.values() for name in shard.sharding.names}
                owned, uncounted = dict[ParameterShard, Tensor](), set[str]()
                for name, who in self._whole_on(plan, rank, stage, owner_ranks).items():
                    of_stream, mine = sync_spec.stream is not None and name in used, parameters[name]
                    if name in divided or not (is_distributed or of_stream or rank == who[0]):
                        continue
                    if of_stream and rank != here[0]:
                        mine = parameter_on(mine.detach().to(devices[rank], copy=True), mine)
                    elif rank != who[0] and sync_spec.stream is None:
                        uncounted.add(name)
                    owned[ParameterShard(name, 0, mine.numel())] = mine
                for shard in shards.values():
                    owned |= {piece: x for piece, x in shard.owned().items() if piece.name in self._optimized}
                if owned or shards:
                    self._stages[rank, stage] = self.optimizer.for_stage(
                        owned, sync_spec.state_on_host, shards, uncounted
                    )
        self.optimizer.attach([*self._stages.values()], parameters, gather)

    def updated_on(self, rank: int) -> Mapping[str, Tensor]:
        """The whole parameters that a rank updates, the model's or copies of them."""
        stages = (stage for (number, _), stage in self._stages.items() if number == rank)
        return {name: parameter for stage in stages for name, parameter in stage.parameters.items()}

    @torch.no_grad()
    def refresh_copies(self, parameters: Mapping[str, Tensor]) -> None:
        """Let all copies be what the parameters of the model are now."""
        for stage in self._stages.values():
            for name, parameter in stage.parameters.items():
                if parameter is not parameters[name]:
                    parameter.copy_(parameters[name])

    def _shard(
        self,
        plan: Plan,
        number: int,
        rank: int,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
    ) -> ShardedBucket:
        sync_spec, bucket = plan.sync_spec, plan.sync_spec.buckets[number]
        sizes = {name: self._like[name].numel() for name in bucket.names}
        divide = shard_evenly if self.optimizer.elementwise >= sizes.keys() else shard_whole_tensors
        replicas, keeps = plan.placement[bucket.stage], not sync_spec.reshards_after_use(bucket)
        return ShardedBucket(
            divide(sizes, len(replicas)),
            replicas.index(rank),
            parameters,
            sync_spec.gradient_dtype,
            keeps,
            device,
            sync_spec.is_in_host_memory(bucket),
        )

    def _whole_on(
        self, plan: Plan, rank: int, stage: int, owner_ranks: Mapping[str, Sequence[int]]
    ) -> dict[str, Sequence[int]]:
        """The whole parameters that a rank updates with a stage, by name, with all ranks that do so.

        Those of a bucket are among them.
        """
        used = plan.stages[stage]
        found = {
            name: plan.placement[stage] for name in used.parameters if name not in used.borrowed_parameters
        }
        if stage == stages_on(plan.placement, rank)[0]:
            in_plan = {name for each in plan.stages for name in each.parameters}
            idle = {name: tuple(owner_ranks.get(name, (0,))) for name in self._like if name not in in_plan}
            found |= {name: who for name, who in idle.items() if rank in who}
        return {name: who for name, who in found.items() if name in self._optimized}

    @contextmanager
    def gathered(self, group_of: GroupOf) -> Iterator[None]:
        """Let parameters that are sharded be whole inside a ``with``. Every rank does so together."""
        for rank, stage, shard in self.buckets():
            shard.unshard(group_of(rank, stage))
        try:
            yield
        finally:
            for *_, shard in self.buckets():
                shard.reshard()

    def release(self, group_of: GroupOf) -> None:
        """Let all parameters, and their gradients, be whole until a program is bound again.

        Every rank does so together.
        """
        for rank, stage, shard in self.buckets():
            shard.release(group_of(rank, stage))
        self._bound = None


class HeldGradients:
    """The gradients of a process, taken off their parameters and off the shards that ``updates`` have."""

    def __init__(self, parameters: Sequence[nn.Parameter], updates: OptimizerUpdates | None) -> None:
        self._updates = updates
        self._gradients = dict[nn.Parameter, Tensor]()
        self._shards = list[tuple[ShardedBucket, ShardGradient]]()
        if updates is not None:
            updates.follow_script()
            self._shards = [(x, taken) for *_, x in updates.buckets() if (taken := x.take_gradient())]
            updates.mark_gradients()
        for parameter in parameters:
            if parameter.grad is not None:
                self._gradients[parameter], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def add(self, factor: Tensor | None = None) -> None:
        """Add them, times ``factor``, to what gradients there are by now. They are not held any longer.

        Raises InputError if parameters are now sharded in another way.
        """
        current = {id(shard) for *_, shard in self._updates.buckets()} if self._updates else set()
        if any(id(shard) not in current for shard, _ in self._shards):
            raise InputError(
                "the parameters were moved or sharded in another way since the step whose gradients are to "
                "be added; call backward() before anything else that changes them"
            )
        if factor is not None and (factor.device.type != "cpu" or factor.item() != 1):
            for gradient in (*self._gradients.values(), *(each.sums for _, each in self._shards)):
                gradient.mul_(factor.to(gradient.device))
        for parameter, gradient in self._gradients.items():
            add_to_grad(parameter, gradient.to(parameter.device))
        for shard, taken in self._shards:
            shard.add_gradient(taken)
        if self._updates is not None:
            self._updates.mark_gradients()


def _small_like(like: Tensor, device: torch.device | str) -> nn.Parameter:
    """A parameter of the same type and number of dimensions."""
    shape = [min(size, 2) for size in like.shape]
    return parameter_on(torch.zeros(shape, dtype=like.dtype, device=device), like)


def _key(plan: Plan) -> object:
    """A key of the plan's fields that decide how parameters are divided."""
    sync_spec = replace(plan.sync_spec, reduces_once=False)
    return plan.placement, sync_spec, tuple(stage.parameters for stage in plan.stages)
