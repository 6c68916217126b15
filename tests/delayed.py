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
    """The unsplit model, its optimizer, and all versions of its weights. ``stage_of`` is by name."""

    model: nn.Module
    factory: Callable[[Any], torch.optim.Optimizer]
    stage_of: Mapping[str, int]
    stages: int
    version: Lag
    loss_of: Callable[[Callable[..., Any], Any], Sequence[tuple[Tensor, float]]]
    clip: float | None = None
    history: list[dict[str, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.optimizer = self.factory(list(self.model.named_parameters()))
        self._note()

    def step(self, batch: Any) -> Tensor:
        """Train on the next mini-batch; returns its loss."""
        number = len(self.history) - 1
        used = {
            name: self.history[self.version(number, stage, self.stages)][name].clone().requires_grad_()
            for name, stage in self.stage_of.items()
        }

        def call(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self.model, used, args, kwargs)

        total: Any = 0.0
        for loss, share in self.loss_of(call, batch):
            loss.backward(torch.full((), share, dtype=loss.dtype))
            total = total + loss.detach() * share
        for name, parameter in self.model.named_parameters():
            parameter.grad = used[name].grad
        if self.clip is not None:
            for stage in range(self.stages):
                own = [p for name, p in self.model.named_parameters() if self.stage_of[name] == stage]
                nn.utils.clip_grad_norm_(own, self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._note()
        return total if isinstance(total, Tensor) else torch.tensor(total)

    def _note(self) -> None:
        self.history.append({name: p.detach().clone() for name, p in self.model.named_parameters()})


def stages_of(plan: Plan) -> dict[str, int]:
    """The stage of each parameter."""
    return {name: stage.index for stage in plan.stages for name in stage.parameters}
