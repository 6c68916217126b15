"""The updates of a program: what each rank of this process updates of each stage, with which gradients."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipec.errors import InputError
from pipec.ir import Bucket, Piece, Plan, Shard, Sharding, Stage
from pipec.ir.sharding import even_slices, whole_tensors
from pipec.runtime.messages.group import Group
from pipec.runtime.optimizers import (
    Factory,
    Gather,
    PipelineOptimizer,
    StageOptimizer,
    clip_factor,
    parameter_on,
    sum_of_squares,
)
from pipec.runtime.stages.replicas import travelling_as
from pipec.runtime.stages.shards import BucketShard, flat_memory
from pipec.runtime.step.finite import NotFinite
from pipec.runtime.step.loss_scale import LossScale

GroupOf = Callable[[int, int], Group]
"""The replicas of a stage as a rank sees them."""


@dataclass(frozen=True)
class StageUpdate:
    """What one rank updates of a stage: whole parameters, and its share of buckets.

    ``counts_whole`` says whether the gradients of the whole parameters count in the global norm: of replicas
    that have the same, one counts them.
    """

    optimizer: StageOptimizer
    parameters: Sequence[nn.Parameter]
    shards: Mapping[int, BucketShard]
    counts_whole: bool

    def squares(self) -> Tensor:
        """What this rank adds to the square of the global norm."""
        return sum_of_squares(self.counted.values())

    @property
    def counted(self) -> dict[str, Tensor]:
        """The gradients, or pieces of them, that this rank counts in the global norm, by name."""
        gradients = self._whole() if self.counts_whole else {}
        return gradients | self._shared()

    def _whole(self) -> dict[str, Tensor]:
        names = {id(tensor): name for name, tensor in self.optimizer.parameters.items()}
        return {names[id(p)]: p.grad for p in self.parameters if p.grad is not None}

    def _shared(self) -> dict[str, Tensor]:
        return {name: x for shard in self.shards.values() for name, x in shard.gradients().items()}

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that no update has used."""
        whole = any(parameter.grad is not None for parameter in self.parameters)
        return whole or any(shard.has_gradients for shard in self.shards.values())

    def held(self) -> dict[str, list[Tensor]]:
        """What the optimizer and the shares keep, by kind, as a meter counts it."""
        found: dict[str, list[Tensor]] = {"optimizer": self.optimizer.held()}
        for shard in self.shards.values():
            for kind, tensors in shard.held().items():
                found.setdefault(kind, []).extend(tensors)
        return found

    def drop_gradients(self) -> None:
        """Forget all gradients, those that are on their way, too."""
        for parameter in self.parameters:
            parameter.grad = None
        for shard in self.shards.values():
            shard.drop_gradients()

    def update(self, factor: Tensor | None, groups: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Make the update with all gradients that there are, times ``factor``, and forget them.

        ``groups`` are its hyperparameters, if not those that the pipeline's optimizer has now.
        """
        self.optimizer.update(self._whole() | self._shared(), factor, groups)
        for shard in self.shards.values():
            shard.forget_gradients()


class Updates:
    """The optimizer of a pipeline, on the ranks of this process.

    ``parameters`` are those of the whole model. ``max_norm`` is what gradients are clipped to, if they are.
    ``loss_scale`` is that of the next step, if the loss is scaled.
    """

    def __init__(
        self,
        factory: Factory,
        max_norm: float | None,
        parameters: Mapping[str, nn.Parameter],
        loss_scale: LossScale | None = None,
    ) -> None:
        self._factory = factory
        self.loss_scale = loss_scale
        self.optimizer = PipelineOptimizer(factory, parameters)
        self.max_norm = max_norm
        groups = self.optimizer.param_groups
        self._optimized = frozenset(name for group in groups for name in group["param_names"])
        self._like = {name: torch.empty_like(each, device="meta") for name, each in parameters.items()}
        self._stages: dict[tuple[int, int], StageUpdate] = {}
        self._copies: dict[int, Mapping[str, nn.Parameter]] = {}
        self._bound: object = None
        self.spoiled: dict[int, NotFinite] = {}
        """By rank, why the next update is to be left out, where steps without an update came before it."""

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the parameters of the whole model."""
        return {name: each.shape for name, each in self._like.items()}

    @property
    def in_shares(self) -> list[str]:
        """The parameters that are there in shares alone, and empty until they are gathered."""
        return [name for shard in self._in_shares() for name in shard.sharding.names]

    def shares(self) -> dict[Piece, Tensor]:
        """The memory of what this process keeps of the parameters that are there in shares alone."""
        return {piece: memory for shard in self._in_shares() for piece, memory in shard.owned().items()}

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients that no update has used."""
        return any(update.has_gradients for update in self._stages.values())

    def of(self, parameters: Mapping[str, nn.Parameter]) -> "Updates":
        """The same for a copy of the parameters, with a copy of the state. Every rank calls this."""
        made = Updates(self._factory, self.max_norm, parameters, copy.deepcopy(self.loss_scale))
        made.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return made

    def on(self, rank: int, stage: int) -> StageUpdate | None:
        """What a rank updates of a stage. Replicas that share parameters leave it to the first one."""
        return self._stages.get((rank, stage))

    def factor(self, squares: Tensor) -> Tensor:
        """What gradients are multiplied with, given the square of their global norm."""
        assert self.max_norm is not None
        return clip_factor(squares, self.max_norm)

    @torch.no_grad()
    def rehearse(self, rank: int, device: torch.device) -> None:
        """Make the updates of a rank with little tensors of the same types, which use the same kernels."""
        for update in [each for (number, _), each in self._stages.items() if number == rank]:
            names = [piece.name for piece in update.optimizer.pieces]
            own = {name: _little(self._like[name], device) for name in names}
            owned: dict[Piece, Tensor] = {Piece(name, 0, x.numel()): x for name, x in own.items()}
            whole = {name: own.get(name, _little(like, "meta")) for name, like in self._like.items()}
            gradients = {name: torch.zeros_like(x) for name, x in own.items()}
            squares = sum_of_squares(gradients.values())
            factor = self.factor(squares) if self.max_norm is not None else None
            optimizer = StageOptimizer(self.optimizer, self._factory, whole, owned)
            optimizer.update(gradients, factor)

    def is_bound_to(self, plan: Plan) -> bool:
        """Whether the parameters are divided as a plan says."""
        return self._bound == _key(plan)

    def drop_gradients(self) -> None:
        """Forget all gradients since the last update: a step has failed that has added some of its own."""
        self.spoiled.clear()
        for update in self._stages.values():
            update.drop_gradients()

    def bind(
        self,
        plan: Plan,
        parameters: Mapping[str, nn.Parameter],
        devices: Mapping[int, torch.device],
        is_distributed: bool,
        gather: Gather,
    ) -> None:
        """Divide the parameters among those who update them, as the plan says.

        ``devices`` are those of the ranks of this process. Replicas of a stage that share a process share its
        parameters. In a stream, where they update at different times, each but the first has copies.
        """
        self._bound, self._stages, self._copies = _key(plan), {}, {}
        keeps = plan.ending.shard is not Shard.PARAMETERS or not is_distributed
        for stage, placement in enumerate(plan.placement):
            here = [rank for rank in placement if rank in devices]
            numbers = plan.ending.buckets_of(stage) if plan.ending.shard else []
            buckets = {number: plan.ending.buckets[number] for number in numbers if here}
            divided = {number: self._divided(each, len(placement)) for number, each in buckets.items()}
            memory = {
                number: flat_memory(buckets[number], sharding, parameters)
                for number, sharding in divided.items()
            }
            for rank in here:
                shards = {
                    number: BucketShard(
                        sharding,
                        placement.index(rank),
                        memory[number],
                        self._like,
                        keeps or buckets[number].lent,
                        travelling_as(plan.ending.gradient_dtype, memory[number].dtype),
                    )
                    for number, sharding in divided.items()
                }
                own = parameters
                if plan.ending.stream and rank != here[0]:
                    own = self._copied(plan.stages[stage], rank, parameters, devices[rank])
                updates_whole = is_distributed or bool(plan.ending.stream) or rank == placement[0]
                self._add(plan, rank, stage, shards, own, updates_whole)
        self.optimizer.attach([update.optimizer for update in self._stages.values()], gather)

    def copies(self, rank: int) -> Mapping[str, Tensor]:
        """The parameters of which a rank has copies of its own."""
        return self._copies.get(rank, {})

    def refresh_copies(self, parameters: Mapping[str, Tensor]) -> None:
        """Let all copies be what the parameters of the model are now."""
        with torch.no_grad():
            for copies in self._copies.values():
                for name, copied in copies.items():
                    copied.copy_(parameters[name])

    def _copied(
        self, stage: Stage, rank: int, parameters: Mapping[str, nn.Parameter], device: torch.device
    ) -> Mapping[str, nn.Parameter]:
        """Copies of what is trained of a stage, for a rank; what is not has no other versions."""
        own = {
            name: parameter_on(parameters[name].detach().to(device, copy=True), parameters[name])
            for name in stage.parameters
            if name in self._optimized
        }
        self._copies[rank] = {**self._copies.get(rank, {}), **own}
        return own

    def _divided(self, bucket: Bucket, num_replicas: int) -> Sharding:
        sizes = {name: self._like[name].numel() for name in bucket.names}
        divide = even_slices if self.optimizer.elementwise >= sizes.keys() else whole_tensors
        return divide(sizes, num_replicas)

    def _add(
        self,
        plan: Plan,
        rank: int,
        stage: int,
        shards: Mapping[int, BucketShard],
        parameters: Mapping[str, nn.Parameter],
        updates_whole: bool,
    ) -> None:
        divided = {name for shard in shards.values() for name in shard.sharding.names}
        own = [
            name
            for name in plan.stages[stage].parameters
            if name not in divided and name not in plan.stages[stage].borrowed and updates_whole
            if name in self._optimized
        ]
        owned: dict[Piece, Tensor] = {
            Piece(name, 0, self._like[name].numel()): parameters[name] for name in own
        }
        for shard in shards.values():
            owned |= {piece: x for piece, x in shard.owned().items() if piece.name in self._optimized}
        if owned or shards:
            self._stages[rank, stage] = StageUpdate(
                self.optimizer.on_stage(owned, plan.ending.state_on_host),
                [parameters[name] for name in own],
                shards,
                counts_whole=plan.ending.stream is not None or rank == plan.placement[stage][0],
            )

    @contextmanager
    def gathered(self, parameters: Mapping[str, nn.Parameter], group_of: GroupOf) -> Iterator[None]:
        """Let parameters that are kept in shares be whole inside a ``with``. Every rank does so together."""
        shards = self._make_whole(parameters, group_of)
        try:
            yield
        finally:
            for shard in shards:
                shard.take_over()
                for name in shard.sharding.names:
                    parameters[name].data = parameters[name].new_empty(0)

    def release(self, parameters: Mapping[str, nn.Parameter], group_of: GroupOf) -> None:
        """Let all parameters be whole until a program is bound again. Every rank does so together.

        Raises:
            InputError: gradients that were accumulated are in shares, which would be lost.
        """
        every = (shard for update in self._stages.values() for shard in update.shards.values())
        if self._bound and any(shard.has_gradients for shard in every):
            raise InputError(
                "gradients have been accumulated that no update has used, and what is trained or held "
                "changes: undo the change, make the update with a step outside of accumulate(), and go on"
            )
        self._make_whole(parameters, group_of)
        self._bound = None

    def _in_shares(self) -> list[BucketShard]:
        every = (shard for update in self._stages.values() for shard in update.shards.values())
        return [shard for shard in every if self._bound and not shard.keeps_parameters]

    def _make_whole(self, parameters: Mapping[str, nn.Parameter], group_of: GroupOf) -> list[BucketShard]:
        """Gather what is kept in shares alone; returns the shares."""
        found = []
        for (rank, stage), update in self._stages.items() if self._bound else ():
            for shard in update.shards.values():
                if not shard.keeps_parameters:
                    shard.start_gather(group_of(rank, stage))
                    for name, tensor in shard.finish_gather().items():
                        parameters[name].data = tensor
                    found.append(shard)
        return found


def _little(like: Tensor, device: torch.device | str) -> nn.Parameter:
    """A parameter of the same type and number of dimensions."""
    shape = [min(size, 2) for size in like.shape]
    return parameter_on(torch.zeros(shape, dtype=like.dtype, device=device), like)


def _key(plan: Plan) -> object:
    """What decides how parameters are divided."""
    return plan.placement, plan.ending, tuple(stage.parameters for stage in plan.stages)
