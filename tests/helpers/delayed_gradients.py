"""Training with delayed gradients in one process, exactly as the versions of a stream say."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipec.ir import Plan

Lag = Callable[[int, int, int], int]
"""The number of updates behind the weights that stage s of p uses for mini-batch i."""


def round_robin(*stages: tuple[int, int]) -> Lag:
    """Of stages with so many replicas, and so many mini-batches of each in flight: (2, 4) is 2 with 4."""

    def version(batch: int, stage: int, count: int) -> int:
        replicas, window = stages[stage]
        return max(0, batch // replicas - (window - 1))

    return version


def stashed(batch: int, stage: int, stages: int) -> int:
    """PipeDream: stage s of p uses its weights after max(0, i - (p - 1 - s)) updates."""
    return max(0, batch - (stages - 1 - stage))


def vertical(batch: int, stage: int, stages: int) -> int:
    """Every stage uses the version that the first one has."""
    return max(0, batch - (stages - 1))


def double(batch: int, stage: int, stages: int) -> int:
    """PipeDream-2BW: W(t + 1) = W(t) - rate * gradient at W(t - 1)."""
    return max(0, batch - 1)


@dataclass
class Delayed:
    """The unsplit model, its optimizer, and all versions of its weights. ``stage_of`` is by name.

    Stage s adds up the gradients of ``replicas[s]`` mini-batches, or of one, and then updates its weights.
    ``history`` has these after each mini-batch.
    """

    model: nn.Module
    factory: Callable[[Any], torch.optim.Optimizer]
    stage_of: Mapping[str, int]
    stages: int
    version: Lag
    loss_of: Callable[[Callable[..., Any], Any], Sequence[tuple[Tensor, float]]]
    clip: float | None = None
    replicas: Sequence[int] = ()
    history: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.optimizer = self.factory(list(self.model.named_parameters()))
        self.replicas = self.replicas or (1,) * self.stages
        self.sums: dict[str, Tensor] = {}
        self._note()

    def step(self, batch: Any) -> Tensor:
        """Train on the next mini-batch; returns its loss."""
        number = len(self.history) - 1
        used = {
            name: self._used(number, stage)[name].clone().requires_grad_()
            for name, stage in self.stage_of.items()
        }

        def call(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self.model, used, args, kwargs)

        total: Any = 0.0
        for loss, share in self.loss_of(call, batch):
            loss.backward(torch.full((), share, dtype=loss.dtype))
            total = total + loss.detach() * share
        for name, weight in used.items():
            gradient = weight.grad
            assert gradient is not None
            self.sums[name] = self.sums[name] + gradient if name in self.sums else gradient
        self._update([stage for stage in range(self.stages) if (number + 1) % self.replicas[stage] == 0])
        self._note()
        return total if isinstance(total, Tensor) else torch.tensor(total)

    def finish(self) -> None:
        """Update the stages whose last round is not complete, as the end of a stream does."""
        self._update(range(self.stages))
        self.history.pop()
        self._note()

    def _used(self, batch: int, stage: int) -> Mapping[str, Tensor]:
        return self.history[self.version(batch, stage, self.stages) * self.replicas[stage]]

    def _update(self, stages: Sequence[int]) -> None:
        for stage in stages:
            own = {n: p for n, p in self.model.named_parameters() if self.stage_of[n] == stage}
            for name, parameter in own.items():
                parameter.grad = self.sums.pop(name, None)
            if self.clip is not None:
                nn.utils.clip_grad_norm_(own.values(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _note(self) -> None:
        self.history.append({name: p.detach().clone() for name, p in self.model.named_parameters()})


def stages_of(plan: Plan) -> dict[str, int]:
    """The stage of each parameter."""
    return {name: stage.index for stage in plan.stages for name in stage.parameters}
