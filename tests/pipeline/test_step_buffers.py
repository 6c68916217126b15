"""Buffers that every microbatch of a step changes in the same way change once a step, as in eager torch."""

from typing import Any

import equality_rows
import pytest
import torch
import torch.nn.functional as F
from equality_rows import LAYOUTS, Row, batch_of, difference, piped
from forward_modules import model as module
from slow_params import slow, slow_but
from torch import Tensor, nn

import pipec
from pipec.errors import PipecWarning

LAYERS: dict[str, Any] = {name: lambda: nn.Linear(4, 4) for name in ("first", "last")}
STEPS: dict[str, Any] = {**LAYERS, "steps": lambda: nn.Buffer(torch.zeros((), dtype=torch.long))}
TEMPERATURE: dict[str, Any] = {**LAYERS, "temperature": lambda: nn.Buffer(torch.ones(3))}


@module(**{**STEPS, **TEMPERATURE})
def Counting(self: Any, x: Tensor) -> Tensor:
    """A number of steps, one that is assigned, and one that the output is scaled by."""
    self.steps += 1
    self.temperature = self.temperature * 0.9
    return self.last(torch.tanh(self.first(x)) * self.temperature.sum() * self.steps).mean(1)


@module(**TEMPERATURE)
def InputMean(self: Any, x: Tensor) -> Tensor:
    """An average of inputs, whose mean over the whole batch is computed once a step."""
    self.temperature.mul_(0.5).add_(x.mean(), alpha=0.5)
    return self.last(torch.tanh(self.first(x)) * self.temperature.sum()).mean(1)


@module(**LAYERS, teacher=lambda: nn.Buffer(torch.zeros(4, 4)))
def Averaged(self: Any, x: Tensor) -> Tensor:
    """An average of weights, as a teacher has it."""
    with torch.no_grad():
        self.teacher.mul_(0.9).add_(self.first.weight, alpha=0.1)
    return (self.last(torch.tanh(self.first(x))) + F.linear(x, self.teacher)).mean(1)


@module(**STEPS)
def NumberOfRows(self: Any, x: Tensor) -> Tensor:
    """The number of rows so far, to which each microbatch adds its own."""
    self.steps += len(x)
    return self.last(torch.tanh(self.first(x)))


@module(**LAYERS, middle=lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
def SpectralNorms(self: Any, x: Tensor) -> Tensor:
    """The vectors of a power iteration follow from the weight alone. Cuts may fall into the iteration."""
    return self.last(torch.relu(self.middle(torch.tanh(self.first(x))))).mean(1)


MAKE = {make.__name__: make for make in (Counting, InputMean, Averaged, SpectralNorms)}
OPTIONS: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"recompute": "recomputed"},
    {"schedule": "zb-h1", "layout": "3x2"},
    {"schedule": "1f1b", "layout": "2x2"},
]
ROWS = [Row(model, update="sgd", **options) for options in OPTIONS for model in MAKE]


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has these models, and one more layout."""
    monkeypatch.setattr(equality_rows, "MODELS", MAKE)
    monkeypatch.setitem(LAYOUTS, "3x2", {"devices": 6, "replicas": 2})  # type: ignore[misc]


@pytest.mark.filterwarnings("error::pipec.errors.PipecWarning")
@pytest.mark.parametrize("row", slow_but(ROWS, *ROWS[:2], *ROWS[6:11]), ids=str)
def test_they_change_once_a_step(row: Row) -> None:
    assert not difference(row)


@pytest.mark.parametrize("shard", [*map(slow, (None, "optimizer", "gradients")), "parameters"])
def test_a_gradient_that_comes_from_another_stage_alone_is_summed_over_replicas(shard: str | None) -> None:
    """The owner of the weight makes vectors of it without a gradient; another stage uses it."""
    row = Row("SpectralNorms", schedule="1f1b", layout="3x2", update="sgd", shard=shard)
    assert not difference(row)
    script = piped(row)
    script.step(*batch_of(row, 0, 8))
    weight = "middle.parametrizations.weight.original"
    assert any(weight in stage.borrowed_parameters for stage in script.pipe.plan.stages)


def test_what_follows_from_rows_changes_with_each_microbatch_and_a_warning_says_so() -> None:
    model = NumberOfRows()
    pipe = pipec.compile(model, loss_fn=F.mse_loss, microbatches=4, devices=2)
    x, y = torch.randn(2, 16, 4)
    with pytest.warns(PipecWarning, match="changes steps: once for each of the 4 microbatches"):
        pipe.step(x, target=y)
    assert model.steps == 16
