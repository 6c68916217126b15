"""Building blocks of models of several families."""

import itertools
from collections.abc import Callable

import torch
from forward_modules import model as model
from torch import Tensor, nn


def perceptron(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths, with an activation between each two."""
    parts: list[nn.Module] = []
    for num_in, num_out in itertools.pairwise(widths):
        parts += [nn.Linear(num_in, num_out), activation()]
    return nn.Sequential(*parts[:-1])


def linears(number: int, num_in: int, num_out: int) -> nn.ModuleList:
    """Linear layers of the same widths."""
    return nn.ModuleList(nn.Linear(num_in, num_out) for _ in range(number))


class Residual(nn.Sequential):
    """Layers in turn, and their input is added to their output."""

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


class Branches(nn.Sequential):
    """Layers side by side. Their outputs are joined along the second dimension."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([layer(input) for layer in self], 1)


@model(layer=lambda layer: layer)
def first_output(self, input: Tensor) -> Tensor:
    """The output of a layer that returns its states, or weights, as well."""
    return self.layer(input)[0]


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input)


def turned() -> nn.Module:
    """Swaps the last two dimensions."""
    return Apply(lambda x: x.mT)
