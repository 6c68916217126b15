"""Modules that are awkward to capture, and functions that train any model by a pipeline and in eager torch.

Each module maps rows of ``SHAPE`` to rows of the same shape, and stands between two layers: two stages may
meet on either side of it or inside.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from unsplit_reference import Inputs, StepResult, assert_equal, loss_of, relative_error, unsplit_step

import pipec

SHAPE = TOKENS, WIDTH = 3, 4

SIZES = 3, 2
"""Rows of the microbatches into which ``batch`` is split."""


def module(attributes: Callable[[], dict[str, Any]]) -> Callable[[Callable[..., Any]], Any]:
    """Makes a class of a ``forward``. Its instances have these attributes; tensors are buffers."""

    def initialize(self: nn.Module) -> None:
        nn.Module.__init__(self)
        for name, value in attributes().items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def made(forward: Callable[..., Any]) -> Any:
        forward.__code__ = forward.__code__.replace(co_name="forward")  # which torch looks for in stacks
        body = {"__init__": initialize, "forward": forward, "__module__": forward.__module__}
        return type(forward.__name__, (nn.Module,), body)

    return made


@module(lambda: {"layer": nn.Linear(WIDTH, WIDTH)})
def Autocast(self: Any, x: Tensor) -> Tensor:
    """A region of lower precision inside the model."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = self.layer(x)
    return x + low.to(x.dtype)


class MovingMean(nn.Module):
    """Buffers that ``forward`` changes: one by assignment, one in place."""

    mixes_rows = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        self.count += 1
        return x - self.mean / self.count


@module(lambda: {"idle": nn.Linear(WIDTH, WIDTH)})
def Unused(self: Any, x: Tensor) -> Tensor:
    """A layer that nothing calls: its gradient is None, not zero."""
    return x.square()


class Sizes(nn.Module):
    """Numbers that depend on the size of the batch, in operations on tensors."""

    mixes_rows = True

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


Odd = Callable[..., Tensor]


class Net(nn.Module):
    """Three layers, with something odd between the first two: a function of the model and its arguments."""

    def __init__(self, odd: Odd, prepare: Callable[[Any], object] = lambda net: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.odd = odd
        prepare(self)

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return self.last(self.middle(self.odd(self, self.first(x), **others)).tanh())


def batch() -> dict[str, Tensor]:
    x, target = torch.randn(2, sum(SIZES), *SHAPE, generator=torch.Generator().manual_seed(1))
    return {"x": x, "target": target}


def asserted_below(x: Tensor, limit: float) -> Tensor:
    """``x``. pytest rewrites what test files assert, so that torch sees another statement there."""
    assert x.max().item() < limit, "too much"
    return x


def trained_both_ways(
    model: nn.Module,
    inputs: Inputs,
    sizes: Sequence[int] = SIZES,
    loss_fn: Callable[..., Tensor] = nn.functional.mse_loss,
    **options: Any,
) -> tuple[StepResult, StepResult, pipec.Pipeline]:
    """The results of a step of a pipeline, and of the unsplit model run over the same microbatches.

    ``inputs`` are ``x`` and ``target``. Modules that mix the rows of a microbatch take the mean over
    microbatches on purpose.
    """
    unsplit, unsplit_loss_fn = copy.deepcopy((model, loss_fn))
    if any(getattr(module, "mixes_rows", False) for module in model.modules()):
        options["microbatch_weight"] = "rows"
    pipe = pipec.compile(model, **{"devices": 2, "loss_fn": loss_fn, "microbatches": len(sizes), **options})
    found = StepResult.of(pipe.step(inputs["x"], target=inputs["target"]), model)
    loss = unsplit_step(lambda x, target: unsplit_loss_fn(unsplit(x), target), inputs, sizes, unsplit)
    return found, StepResult.of(loss, unsplit), pipe


def assert_same_bits(model: nn.Module, inputs: Inputs, *args: Any, **options: Any) -> pipec.Pipeline:
    """Train both ways, and compare. Returns the pipeline."""
    found, expected, pipe = trained_both_ways(model, inputs, *args, **options)
    tied = frozenset(fqn for stage in pipe.plan.stages for fqn in stage.borrowed_parameters)
    assert_equal(found, expected, tied)
    return pipe


class Pair:
    """A pipeline, and a copy of its model in eager torch that sees the whole batch. They compute the same."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None = None, **options: Any) -> None:
        self.model: Any = model
        self.unsplit, self.loss_fn = copy.deepcopy(model), loss_fn
        self.pipe = pipec.compile(model, **{"devices": 2, "microbatches": 2, "loss_fn": loss_fn, **options})

    def loss(self, *args: Any, target: Any = None, **kwargs: Any) -> tuple[Tensor, Any]:
        """The loss of the unsplit model, and its output."""
        output = self.unsplit(*args, **kwargs)
        if self.loss_fn is not None:
            return self.loss_fn(output, target), output
        return loss_of(output), output

    def step(
        self, *args: Any, target: Any = None, outputs: bool = False, error: float | None = None, **kwargs: Any
    ) -> Tensor:
        """Compare the loss, all gradients and, on request, the outputs. Returns the loss."""
        self.model.zero_grad()
        self.unsplit.zero_grad()
        expected, output = self.loss(*args, target=target, **kwargs)
        expected.backward()
        given = kwargs if self.loss_fn is None else {**kwargs, "target": target}
        found = self.pipe.step(*args, **given, **({"outputs": True} if outputs else {}))
        if outputs:
            found, found_output = found
            assert_near(found_output, output, "output", error)
        assert_near(found, expected, "loss", error)
        self.check_gradients(error)
        return found

    def check_gradients(self, error: float | None = None) -> None:
        for (name, mine), theirs in zip(
            self.model.named_parameters(), self.unsplit.parameters(), strict=True
        ):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None and theirs.grad is not None:
                assert_near(mine.grad, theirs.grad, name, error)

    def evaluate(self, *args: Any, **given: Any) -> None:
        """Compare the loss of an evaluation."""
        with torch.no_grad():
            expected, _ = self.loss(*args, **given)
        assert_near(self.pipe.eval_step(*args, **given), expected, "loss of an evaluation")


def assert_near(found: Tensor, expected: Tensor, name: str, error: float | None = None) -> None:
    """Sums may be made in another order: ``error`` is relative to the whole tensor, or absolute."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    if error is None:
        error = 1e-12 if expected.dtype == torch.float64 else 5e-6
    off = relative_error(found.detach(), expected.detach())
    is_near = off <= error or float((found - expected).detach().abs().max()) <= error
    assert is_near, f"{name} is off by {off:.1e}"


def train_as_eager(
    model: nn.Module, *args: Any, loss_fn: Any = None, options: Any = None, **given: Any
) -> pipec.Pipeline:
    """Compare a step with eager torch on the whole batch. Returns the pipeline."""
    pair = Pair(model, loss_fn, **(options or {}))
    pair.step(*args, **given)
    return pair.pipe
