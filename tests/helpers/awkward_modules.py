"""Modules that are awkward to capture, as real models have them.

Each maps rows of ``SHAPE`` to rows of the same shape, and stands between two layers: two stages may meet on
either side of it or inside.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SHAPE = TOKENS, WIDTH = 3, 4

SIZES = 3, 2
"""Rows of the microbatches into which ``batch`` is split."""


class Recurrent(nn.Module):
    """torch's own LSTM, of which the outputs and the last state are used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs, (hidden, cell) = self.layer(x)
        return outputs + (hidden * cell).transpose(0, 1)


class CellLoop(nn.Module):
    """A Python loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = x.new_zeros(x.shape[0], WIDTH), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state)
        return torch.stack(outputs, 1)


class Encoder(nn.Module):
    """torch's own Transformer, with a mask over the future."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x, nn.Transformer.generate_square_subsequent_mask(TOKENS), is_causal=True)


class StraightThrough(torch.autograd.Function):
    """Rounds. The true derivative is zero; what trains is the backward written here."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 3 * gradient


class Quantized(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return StraightThrough.apply(4 * x) + x


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


class Autocast(nn.Module):
    """A region of lower precision inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.layer(x)
        return x + low.to(x.dtype)


class Teacher(nn.Module):
    """Regions without gradients: in a ``with`` block and under the decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    @torch.no_grad()
    def teach(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = x.mean(-1, keepdim=True)
        return (x - mean) * self.teach(x) + self.layer(x)


class InPlace(nn.Module):
    """Writes through views, into slices and by mask, where autograd permits it."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(2 * x)
        z = y.clone()
        z[:, 0] = 1.0
        z[:, 1:].mul_(3)
        z.masked_fill_(x > 1, -1.0)
        z[:, -1].copy_(x[:, 0])
        return z.add_(x)


class FrozenNorm(nn.Module):
    """Parameters that are not trained, before and after one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.after = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(self.before(x)))


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


class Shared(nn.Module):
    """One layer under two names, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([self.first, nn.Tanh(), self.first])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.first(x)


class Unused(nn.Module):
    """A layer that nothing calls: its gradient is None, not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.square()


class Hooked(nn.Module):
    """Hooks before and after a layer, and one on a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.layer.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.register_hook(lambda gradient: gradient * 3)
        return y.tanh()


class Normalized(nn.Module):
    """Weights that are computed from others at every call; one of them moves a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.spectral(self.weight(x))


class Fourier(nn.Module):
    """Complex numbers inside the model."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.fft.fft2(x) * (2 - 1j)).real


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
