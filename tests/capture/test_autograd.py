"""Models that differentiate something themselves: forward and backward are traced together."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_params import slow
from torch import Tensor, nn
from unsplit_reference import StepResult, relative_error

import pipec
from pipec.errors import CaptureError

ROWS, WIDTH = 8, 6


class Physics(nn.Module):
    """A network whose loss is the residual of the heat equation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        (first,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return (first[:, 1] - second[:, 0]).square().mean()


class Critic(nn.Module):
    """The critic of a WGAN with a gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.LeakyReLU(), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
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


class Custom(nn.Module):
    """A custom backward that differentiates, a hook on a node of autograd, a constant and a conversion."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first.to(torch.float32)(x) + torch.tensor([1.0] * WIDTH)
        h = Recomputed.apply(self.norm(first), self.weight)
        h.grad_fn.register_hook(lambda inputs, outputs: tuple(3 * each for each in inputs))  # type: ignore[union-attr]
        return self.last(h).square().mean()


def physics() -> tuple[nn.Module, dict[str, Tensor]]:
    return Physics(), {"x": torch.randn(ROWS, 2)}


def critic() -> tuple[nn.Module, dict[str, Tensor]]:
    return Critic(), {"real": torch.randn(ROWS, WIDTH), "fake": torch.randn(ROWS, WIDTH)}


def custom() -> tuple[nn.Module, dict[str, Tensor]]:
    return Custom(), {"x": torch.randn(ROWS, WIDTH)}


@pytest.mark.parametrize(("make", "microbatches"), [(physics, 2), slow(critic, 2), (custom, 1)])
def test_gradients_are_those_of_eager_mode(
    make: Callable[[], tuple[nn.Module, dict[str, Tensor]]],
    microbatches: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For two sizes of the batch, and losses that are means over rows, of which no warning speaks."""
    torch.manual_seed(0)
    model, given = make()
    pipe = pipec.compile(model, 2, microbatches=microbatches)
    for rows in (ROWS, ROWS - 2):
        some = {name: value[:rows] for name, value in given.items()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.zero_grad()
        found = StepResult.of(pipe.step(**some), model)
        model.zero_grad()
        model.load_state_dict(buffers, strict=False)
        loss = model(**some)
        loss.backward()
        expected = StepResult.of(loss.detach(), model)
        assert relative_error(found.loss, expected.loss) < 1e-5
        assert found.gradients.keys() == expected.gradients.keys()
        for kind in ("gradients", "buffers"):
            for name, tensor in getattr(found, kind).items():
                torch.testing.assert_close(tensor, getattr(expected, kind)[name], msg=name)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith("forward and backward were traced together")
    assert all(operator.source.startswith("test_autograd.py:") for operator in _operators(pipe))
    assert make is not physics or "# net.2 · Linear" in pipe.source(0)


def _operators(pipe: pipec.Pipeline) -> list[Any]:
    (staged,) = pipe._executions.compiler.cache.staged_graphs
    return list(staged.graph.operators)


def test_what_changes_a_value_that_was_read_compiles_anew() -> None:
    """Nobody tells what the code read, so all that it could read is compared."""

    class Scaled(nn.Module):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.second(self.first(x)).square()
            assert y.grad_fn.metadata is not None  # which no other front end takes
            return y.mean() * self.scale

    model, x = Scaled(), torch.randn(ROWS, 2)
    pipe = pipec.compile(model, 2, microbatches=2)
    before = pipe.step(x)
    model.scale = 3.0
    torch.testing.assert_close(pipe.step(x), 3 * before)


# what is refused


class Checkpointed(Physics):
    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.net.insert(2, between)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        assert y.grad_fn.metadata is not None  # which no other front end takes
        return y.square().mean()


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


class Accumulates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = Accumulating.apply(self.first(x), self.second.weight)
        assert y.grad_fn.metadata is not None  # which no other front end takes
        return y.square().mean()


@pytest.mark.parametrize(
    ("model", "width", "message"),
    [
        (lambda: Checkpointed(nn.Dropout(0.5)), 2, "a backward draws random numbers"),
        (lambda: Checkpointed(nn.BatchNorm1d(8)), 2, "the backward changes net.2.running_mean"),
        (Accumulates, WIDTH, "the backward writes to the .grad of a parameter"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(
    model: Callable[[], nn.Module], width: int, message: str
) -> None:
    pipe = pipec.compile(model(), 2, microbatches=2)
    with pytest.raises(CaptureError, match=message):
        pipe.step(torch.randn(ROWS, width))
