"""Buffers that every microbatch of a step changes in the same way change once a step, as in eager torch."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipec
from pipec.errors import PipecWarning

SIZES = (16, 12)
"""Rows of the mini-batch of each step, in four microbatches."""


class Counting(nn.Module):
    """A number of steps, one that is assigned, and one that the output is scaled by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("temperature", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.temperature = self.temperature * 0.9
        return self.last(torch.tanh(self.first(x)) * self.temperature.sum() * self.steps)


class InputMean(Counting):
    """An average of inputs, whose mean over the whole batch is computed once a step."""

    def forward(self, x: Tensor) -> Tensor:
        self.temperature.mul_(0.5).add_(x.mean(), alpha=0.5)
        return self.last(torch.tanh(self.first(x)) * self.temperature.sum())


class Averaged(nn.Module):
    """An average of weights, as a teacher has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("teacher", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.mul_(0.9).add_(self.first.weight, alpha=0.1)
        return self.last(torch.tanh(self.first(x))) + F.linear(x, self.teacher)


class SpectralNorms(nn.Module):
    """The vectors of a power iteration follow from the weight alone. Cuts may fall into the iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.middle(torch.tanh(self.first(x)))))


class Rows(Counting):
    """The number of rows so far, to which each microbatch adds its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.steps += len(x)
        return self.last(torch.tanh(self.first(x)))


LAYOUTS: list[dict[str, Any]] = [
    {"devices": 2},
    {"devices": 2, "schedule": "gpipe", "recompute": "full"},
    {"devices": 4, "replicas": 2},
    {"devices": 6, "replicas": 2, "schedule": "zb-h1"},
]


@pytest.mark.filterwarnings("error::pipec.errors.PipecWarning")
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("made", [Counting, InputMean, Averaged, SpectralNorms])
def test_they_change_once_a_step(made: type[nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = made().double()
    eager = copy.deepcopy(model)
    pipe = pipec.compile(model, loss_fn=F.mse_loss, microbatches=4, **options)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, eager)]
    for rows in SIZES:
        x, y = torch.randn(2, rows, 8, dtype=torch.float64)
        for each in optimizers:
            each.zero_grad()
        found, expected = pipe.step(x, target=y), F.mse_loss(eager(x), y)
        expected.backward()
        torch.testing.assert_close(found, expected.detach())
        for (fqn, own), other in zip(model.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, msg=fqn)
        for (fqn, own), other in zip(model.named_buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(own, other, msg=fqn)
        for each in optimizers:
            each.step()


@pytest.mark.parametrize("shard", [None, "optimizer", "gradients", "parameters"])
def test_a_gradient_that_comes_from_another_stage_alone_is_summed_over_replicas(shard: str | None) -> None:
    """The owner of the weight makes vectors of it without a gradient; another stage uses it."""
    torch.manual_seed(0)
    model = SpectralNorms().double()
    eager = copy.deepcopy(model)
    options = {"devices": 6, "replicas": 2, "microbatches": 4, "shard": shard}
    pipe = pipec.compile(
        model, loss_fn=F.mse_loss, optimizer=lambda own: torch.optim.SGD(own, 0.1, momentum=0.9), **options
    )
    weight = "middle.parametrizations.weight.original"
    assert any(
        weight in stage.borrowed_parameters
        for stage in pipe.prepare(
            *[torch.zeros(16, 8).double()], target=torch.zeros(16, 8).double()
        ).plan.stages
    )
    optimizer = torch.optim.SGD(eager.parameters(), 0.1, momentum=0.9)
    for rows in SIZES:
        x, y = torch.randn(2, rows, 8, dtype=torch.float64)
        optimizer.zero_grad()
        pipe.step(x, target=y)
        F.mse_loss(eager(x), y).backward()
        optimizer.step()
    for fqn, value in pipe.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[fqn], msg=fqn)


def test_what_follows_from_rows_changes_with_each_microbatch_and_a_warning_says_so() -> None:
    model = Rows()
    pipe = pipec.compile(model, loss_fn=F.mse_loss, microbatches=4, devices=2)
    x, y = torch.randn(2, 16, 8)
    with pytest.warns(PipecWarning, match="changes steps: once for each of the 4 microbatches"):
        pipe.step(x, target=y)
    assert model.steps == 16
