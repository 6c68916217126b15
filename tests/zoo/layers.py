"""What models of several families are made of."""

import itertools
from collections.abc import Callable

from torch import nn


def perceptron(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths, with an activation between each two."""
    parts: list[nn.Module] = []
    for num_in, num_out in itertools.pairwise(widths):
        parts += [nn.Linear(num_in, num_out), activation()]
    return nn.Sequential(*parts[:-1])
