"""Models that differentiate something themselves: forward and backward are traced together."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from awkward_modules import Pair, module
from slow_params import slow
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipec
from pipec.errors import CaptureError

ROWS, WIDTH = 8, 6


@module(
    lambda: {"net": nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))}
)
def Physics(self: Any, x: Tensor) -> Tensor:
    """A network whose loss is the residual of the heat equation."""
    x = x.detach().requires_grad_(True)
    (first,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (first[:, 1] - second[:, 0]).square().mean()


@module(lambda: {"net": nn.Sequential(nn.Linear(WIDTH, 8), nn.LeakyReLU(), nn.LayerNorm(8), nn.Linear(8, 1))})
def Critic(self: Any, real: Tensor, fake: Tensor) -> Tensor:
    """The critic of a WGAN with a gradient penalty."""
    mixed = (0.25 * real + 0.75 * fake).detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(self.net(mixed).sum(), mixed, create_graph=True)
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    return self.net(fake).mean() - self.net(real).mean() + 10 * penalty


class Recomputed(torch.autograd.Function):
    """``tanh(x w)`` of which the backward computes the forward again; its gradient of ``w`` is doubled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.tanh(x @ w)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.tanh(x @ w)
        of_x, of_w = torch.autograd.grad(y, [x, w], gradient)
        return of_x, 2 * of_w


@module(
    lambda: {
        "first": nn.Linear(WIDTH, WIDTH),
        "norm": nn.BatchNorm1d(WIDTH),
        "last": nn.Linear(WIDTH, 1),
        "weight": nn.Parameter(torch.randn(WIDTH, WIDTH)),
    }
)
def Custom(self: Any, x: Tensor) -> Tensor:
    """A custom backward that differentiates, a hook on a node of autograd, a constant and a conversion."""
    first = self.first.to(torch.float32)(x) + torch.tensor([1.0] * WIDTH)
    h = Recomputed.apply(self.norm(first), self.weight)
    h.grad_fn.register_hook(lambda inputs, outputs: tuple(3 * each for each in inputs))  # type: ignore[union-attr]
    return self.last(h).square().mean()


@pytest.mark.parametrize(
    ("make", "widths", "microbatches"),
    [(Physics, {"x": 2}, 2), slow(Critic, {"real": WIDTH, "fake": WIDTH}, 2), (Custom, {"x": WIDTH}, 1)],
)
def test_gradients_are_those_of_eager_mode(
    make: Callable[[], nn.Module], widths: dict[str, int], microbatches: int, caplog: pytest.LogCaptureFixture
) -> None:
    """For two sizes of the batch, and losses that are means over rows: no warning speaks of them."""
    torch.manual_seed(0)
    pair = Pair(make(), microbatches=microbatches)
    for rows in (ROWS, ROWS - 2):
        pair.step(error=1e-5, **{name: torch.randn(rows, width) for name, width in widths.items()})
        for found, expected in zip(pair.model.buffers(), pair.unsplit.buffers(), strict=True):
            torch.testing.assert_close(found, expected)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("forward and backward were traced together")
    (staged,) = pair.pipe._executions.compiler.cache.staged_graphs
    assert all(operator.source.startswith("test_autograd.py:") for operator in staged.graph.operators)
    assert make is not Physics or "# net.2 · Linear" in pair.pipe.source(0)


class Traced(nn.Module):
    """Two layers, in a forward that no other front end takes."""

    def __init__(self, width: int, compute: Callable[[Any, Tensor], Tensor], between: Any = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 8), between or nn.Identity(), nn.Linear(8, 8))
        self.compute, self.scale = compute, 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.compute(self, x)
        assert y.grad_fn.metadata is not None  # type: ignore[union-attr]
        return y.square().mean() * self.scale


def test_what_changes_a_value_that_was_read_compiles_anew() -> None:
    """Nobody tells what the code read, so all that it could read is compared."""
    model, x = Traced(2, lambda self, x: self.net(x)), torch.randn(ROWS, 2)
    pipe = pipec.compile(model, 2, microbatches=2)
    before = pipe.step(x)
    model.scale = 3.0
    torch.testing.assert_close(pipe.step(x), 3 * before)


# what is refused


def checkpointed(self: Any, x: Tensor) -> Any:
    return checkpoint(self.net, x, use_reentrant=False)


class Accumulating(torch.autograd.Function):
    """Its backward adds to a gradient by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.weight.grad = torch.ones_like(ctx.weight)
        return gradient @ ctx.weight.T, None


def accumulates(self: Any, x: Tensor) -> Any:
    return Accumulating.apply(self.net[0](x), self.net[2].weight)


@pytest.mark.parametrize(
    ("compute", "between", "message"),
    [
        (checkpointed, nn.Dropout(0.5), "a backward draws random numbers"),
        (checkpointed, nn.BatchNorm1d(8), "the backward changes net.1.running_mean"),
        (accumulates, None, "the backward writes to the .grad of a parameter"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(compute: Any, between: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        pipec.compile(Traced(2, compute, between), 2, microbatches=2).step(torch.randn(ROWS, 2))
