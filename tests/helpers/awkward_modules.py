"""Modules that are awkward to capture, as real models have them.

Each maps rows of ``SHAPE`` to rows of the same shape, and stands between two layers: two stages may meet on
either side of it or inside.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

SHAPE = TOKENS, WIDTH = 3, 4

SIZES = 3, 2
"""Rows of the microbatches into which ``batch`` is split."""


class Autocast(nn.Module):
    """A region of lower precision inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.layer(x)
        return x + low.to(x.dtype)


class MovingMean(nn.Module):
    """Buffers that ``forward`` changes: one by assignment, one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        self.count += 1
        return x - self.mean / self.count


class Unused(nn.Module):
    """A layer that nothing calls: its gradient is None, not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.square()


class Sizes(nn.Module):
    """Numbers that depend on the size of the batch, in operations on tensors."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        x = x * (1 / rows) + x.sum() / x.numel() - (rows - 1)
        return x / math.sqrt(2 * rows) * math.ceil(rows / 2) + (x < rows - 2) * (rows % 2 + rows // 2)


class Branch(nn.Module):
    """Cannot be captured: the value of a tensor decides what runs."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return x


class Between(nn.Module):
    """A module between two layers, so that there is something to train on either side of it."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.awkward = make()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.awkward(torch.tanh(self.first(x))))


def batch(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, sum(SIZES), *SHAPE, generator=generator, dtype=dtype)
    return {"x": x, "target": target}


def asserted_below(x: Tensor, limit: float) -> Tensor:
    """``x``. pytest rewrites what test files assert, so that torch sees another statement there."""
    assert x.max().item() < limit, "too much"
    return x
