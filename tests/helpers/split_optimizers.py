"""A model of two stages whose parameters a program's optimizer updates, beside the one that torch updates."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from pipec.ir.sharding import ParameterShard, Sharding, shard_evenly, shard_whole_tensors
from pipec.runtime.optimizers import PipelineOptimizer, StageOptimizer, StateShard
from pipec.runtime.optimizers.factory import Factory, Named

SHAPES = {"a.weight": (13, 79), "a.bias": (13,), "scale": (), "b.weight": (5, 13), "b.bias": (5,)}
STAGES = (("a.weight", "a.bias", "scale"), ("b.weight", "b.bias"))


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """The parameters of a small model, by name."""
    draws = torch.Generator().manual_seed(seed)
    return {
        name: nn.Parameter(torch.randn(shape, generator=draws).to(dtype)) for name, shape in SHAPES.items()
    }


def gradients(step: int, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(1000 + step)
    return {name: torch.randn(each.shape, generator=draws).to(each.dtype) for name, each in like.items()}


def alone(own: list[StateShard]) -> list[list[StateShard]]:
    """What all processes keep, if there is one."""
    return [own]


class Split:
    """A model in two stages of ``num_replicas`` ranks each, which own slices of its parameters."""

    def __init__(
        self, factory: Factory, num_replicas: int = 1, seed: int = 0, attach: bool = True, **kinds: Any
    ) -> None:
        self.parameters = model(seed, **kinds)
        self.optimizer = PipelineOptimizer(factory, self.parameters)
        self.divide(num_replicas, attach)

    def divide(self, num_replicas: int, attach: bool = True) -> None:
        """Divide each stage among its replicas, anew."""
        self.stages: list[StageOptimizer] = []
        for names in STAGES:
            for kind, build in ((True, shard_evenly), (False, shard_whole_tensors)):
                own = [name for name in names if (name in self.optimizer.elementwise) is kind]
                if own:
                    self._add(build({name: self.parameters[name].numel() for name in own}, num_replicas))
        if attach:
            self.optimizer.attach(self.stages, self.parameters, alone)

    def _add(self, sharding: Sharding) -> None:
        for replica in range(sharding.num_replicas):
            owned = {piece: self._memory(piece) for piece in sharding.shards_of(replica)}
            self.stages.append(self.optimizer.for_stage(owned))

    def _memory(self, piece: ParameterShard) -> Tensor:
        parameter = self.parameters[piece.name]
        if piece.size == parameter.numel():
            return parameter
        return parameter.detach().view(-1)[piece.start : piece.stop]

    def step(self, number: int, without: Iterable[str] = (), factor: Tensor | None = None) -> None:
        grads = {k: v for k, v in gradients(number, self.parameters).items() if k not in set(without)}
        for stage in self.stages:
            stage.update(
                {p.name: grads[p.name].view(-1)[p.start : p.stop] for p in stage.pieces if p.name in grads},
                factor,
            )
        self.optimizer.count_step()


class Plain:
    """The same model, and the optimizers that torch steps."""

    def __init__(self, factory: Factory, seed: int = 0, **kinds: Any) -> None:
        self.parameters = model(seed, **kinds)
        made = factory(list(self.parameters.items()))
        self.optimizers = [made] if isinstance(made, optim.Optimizer) else list(made)

    def step(self, number: int, without: Iterable[str] = ()) -> None:
        for name, gradient in gradients(number, self.parameters).items():
            self.parameters[name].grad = None if name in set(without) else gradient
        for each in self.optimizers:
            each.step()


def require_same(split: Split, plain: Plain) -> None:
    for name, parameter in plain.parameters.items():
        assert torch.equal(split.parameters[name], parameter), name


def by_group(named: Named) -> optim.Optimizer:
    """Decays matrices, and forgets the names."""
    matrices = [each for _, each in named if each.ndim == 2]
    others = [each for _, each in named if each.ndim != 2]
    return optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01)


def two(named: Named) -> list[optim.Optimizer]:
    """Muon for matrices and AdamW for the rest."""
    return [
        optim.Muon([(name, each) for name, each in named if each.ndim == 2], lr=0.02),
        optim.AdamW([(name, each) for name, each in named if each.ndim != 2], lr=0.01),
    ]


class Declared(optim.SGD):
    """An optimizer of the user's own, which says that it is elementwise."""

    pipec_elementwise = True


class Anchored(optim.Optimizer):
    """Pulls parameters towards the values that they had when it was made, which it remembers at once."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.parameters = [each for group in self.param_groups for each in group["params"]]
        for each in self.parameters:
            self.state[each]["anchor"] = each.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.parameters:
            if each.grad is not None:
                each -= self.param_groups[0]["lr"] * (each.grad + each - self.state[each]["anchor"])


partial = functools.partial

ELEMENTWISE: dict[str, Factory] = {
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": partial(optim.Adam, lr=0.01, weight_decay=0.01),
    "AdamW": partial(optim.AdamW, lr=0.01, amsgrad=True),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adadelta": optim.Adadelta,
    "ASGD": partial(optim.ASGD, lr=0.1, t0=3),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "fused SGD": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "fused AdamW": partial(optim.AdamW, lr=0.01, fused=True),
    "fused Adagrad": partial(optim.Adagrad, lr=0.1, fused=True),
    "foreach Adam": partial(optim.Adam, lr=0.01, foreach=True),
    "groups": by_group,
}
WHOLE: dict[str, Factory] = {
    "Adafactor": partial(optim.Adafactor, lr=0.01),
    "Muon and AdamW": two,
    "Anchored": Anchored,
}
EVERY = {**ELEMENTWISE, **WHOLE}
