"""Evaluations between steps: they see the model as it is, and code that runs without gradients."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

WIDTH = 4


class Gained(nn.Module):
    """Multiplies by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.linear, self.drop = 2.0, nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.drop(self.linear(x)) * self.gain
        return found


class Doubled(nn.Linear):
    """Doubles its result where it finds that gradients are disabled."""

    def __init__(self, has_gradients: Callable[[Tensor], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.has_gradients = has_gradients

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found if self.has_gradients(found) else found * 2


def pipeline(model: nn.Module) -> pipec.Pipeline:
    return pipec.compile(model, devices=1, microbatches=2, loss_fn=F.mse_loss)


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return F.mse_loss(model(x), x)


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda model: setattr(model, "gain", 3.0),
    "a probability": lambda model: setattr(model.drop, "p", 1.0),
    "the mode": lambda model: model.eval(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_evaluation_sees_what_changed_since_a_step_and_since_an_evaluation(name: str) -> None:
    model, unsplit = Gained(), Gained()
    unsplit.load_state_dict(model.state_dict())
    pipe, x = pipeline(model), torch.randn(6, WIDTH)
    pipe.step(x, target=x)
    for change in (CHANGES[name], lambda model: setattr(model, "gain", 4.0)):
        change(model)
        change(unsplit)
        torch.testing.assert_close(pipe.eval_step(x, target=x), evaluated(unsplit, x))


@pytest.mark.parametrize(
    "has_gradients",
    [
        lambda x: torch.is_grad_enabled(),
        lambda x: x.requires_grad,
        lambda x: getattr(x, "".join(["requires_", "grad"])),
        lambda x: not x.is_leaf,
    ],
    ids=["is_grad_enabled", "requires_grad", "getattr", "is_leaf"],
)
def test_code_that_asks_for_gradients_finds_none_in_an_evaluation(
    has_gradients: Callable[[Tensor], Any],
) -> None:
    model = Doubled(has_gradients)
    pipe, x = pipeline(copy.deepcopy(model)), torch.randn(6, WIDTH)
    torch.testing.assert_close(pipe.step(x, target=x), F.mse_loss(model(x), x).detach())
    torch.testing.assert_close(pipe.eval_step(x, target=x), evaluated(model, x))
