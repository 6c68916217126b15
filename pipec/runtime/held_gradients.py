"""The gradients that a process has, held apart from its parameters until they are added again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from pipec.runtime.stages.flat_bucket import ShardedBucket, ShardGradient
from pipec.runtime.step.optimizer_updates import OptimizerUpdates


@dataclass(frozen=True)
class HeldGradients:
    """Gradients by parameter, and those of the shards that ``updates`` have."""

    gradients: Mapping[nn.Parameter, Tensor]
    updates: OptimizerUpdates | None
    shards: Sequence[tuple[ShardedBucket, ShardGradient]]

    @classmethod
    def take(cls, parameters: Sequence[nn.Parameter], updates: OptimizerUpdates | None) -> Self:
        """The gradients of the parameters, which have none from now on."""
        shards, gradients = updates.take_gradients() if updates else [], {}
        for parameter in parameters:
            if parameter.grad is not None:
                gradients[parameter], parameter.grad = parameter.grad, None
        return cls(gradients, updates, shards)

    @torch.no_grad()
    def multiply(self, factor: Tensor) -> None:
        for gradient in (*self.gradients.values(), *(gradient.sums for _, gradient in self.shards)):
            gradient.mul_(factor.to(gradient.device))

    @torch.no_grad()
    def add(self) -> None:
        """Add them to what gradients there are by now. They are not held any longer."""
        for parameter, gradient in self.gradients.items():
            gradient = gradient.to(parameter.device)
            if parameter.grad is None:
                parameter.grad = gradient
            elif gradient.is_sparse or parameter.grad.is_sparse:
                parameter.grad = parameter.grad + gradient
            else:
                parameter.grad.add_(gradient)
        if self.updates is not None:
            self.updates.add_gradients(self.shards)
