"""A random model of twelve steps."""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH, NUM_STEPS = 8, 12

Combine = Callable[..., Tensor]

ELEMENTWISE: tuple[Combine, ...] = (torch.tanh, torch.relu, nn.functional.gelu, torch.square)
JOINING: tuple[Combine, ...] = (torch.add, torch.mul, lambda a, b: (a @ b.transpose(1, 2)).softmax(-1) @ b)

KINDS = {"layer": 4, "map": len(ELEMENTWISE), "join": len(JOINING), "scale": 1, "chunks": 1}
"""The kinds of steps, and how many there are of each."""


class RandomModel(nn.Module):
    """Twelve steps, each of values made before: branches, skips, and layers that are used again."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]
        )
        self.scale = nn.Parameter(torch.randn(WIDTH))
        choose = random.Random(seed)
        self.steps = [self._step(choose, number) for number in range(NUM_STEPS)]

    def _step(self, choose: random.Random, number: int) -> tuple[str, int, int, int]:
        """What is done, with which of its kind, and to which values; the last one is never left out."""
        kind = choose.choice(list(KINDS))
        return kind, choose.randrange(KINDS[kind]), number, choose.randint(0, number)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for kind, which, last, other in self.steps:
            values.append(self._result(kind, which, values[last], values[other]))
        return values[-1]

    def _result(self, kind: str, which: int, value: Tensor, other: Tensor) -> Tensor:
        match kind:
            case "layer":
                return self.layers[which](value) + other
            case "map":
                return ELEMENTWISE[which](value)
            case "join":
                return JOINING[which](value, other)
            case "scale":
                return value * self.scale
        left, right = value.chunk(2, dim=-1)
        return torch.cat([right, left.sigmoid()], dim=-1)
