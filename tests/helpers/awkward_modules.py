"""Layers around awkward parts of models, and ways to train a model by a pipeline and in eager torch.

An awkward part maps rows of ``SHAPE`` to rows of the same shape. Stages meet on either side of it or inside.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from unsplit_reference import Inputs, StepResult, assert_equal, loss_of, relative_error, unsplit_step

import pipec

SHAPE = TOKENS, WIDTH = 3, 4

SIZES = 3, 2
"""Rows of the microbatches into which ``batch`` is split."""


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
    loss_fn: Callable[..., Tensor] | None = nn.functional.mse_loss,
    **options: Any,
) -> tuple[StepResult, StepResult, pipec.Pipeline]:
    """The results of a step of a pipeline, and of the unsplit model run over the same microbatches.

    ``inputs`` are ``x`` and ``target``; a model that returns its loss has no target.
    """
    unsplit, unsplit_loss_fn = copy.deepcopy((model, loss_fn))

    def unsplit_loss(x: Tensor, target: Tensor | None = None) -> Tensor:
        return loss_of(unsplit(x)) if unsplit_loss_fn is None else unsplit_loss_fn(unsplit(x), target)

    pipe = pipec.compile(model, **{"devices": 2, "loss_fn": loss_fn, "microbatches": len(sizes), **options})
    given = {name: value for name, value in inputs.items() if name != "x"}
    found = StepResult.of(pipe.step(inputs["x"], **given), model)
    loss = unsplit_step(unsplit_loss, inputs, sizes, unsplit)
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
