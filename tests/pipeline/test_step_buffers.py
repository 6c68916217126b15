"""Buffers that every microbatch of a step changes in the same way change once a step, as in eager torch."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipec
from pipec.errors import PipecWarning

SIZES = (16, 12)
"""Rows of the mini-batch of each step, in four microbatches."""


class Buffered(nn.Module):
    """Two layers, and buffers that ``forward`` changes before it returns the output."""

    def __init__(self, forward: Callable[["Buffered", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(8, 8), nn.Linear(8, 8), forward
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("temperature", torch.ones(3))
        self.register_buffer("teacher", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def counting(net: Buffered, x: Tensor) -> Tensor:
    """A number of steps, one that is assigned, and one that the output is scaled by."""
    net.steps += 1
    net.temperature = net.temperature * 0.9
    return net.last(torch.tanh(net.first(x)) * net.temperature.sum() * net.steps)


def input_mean(net: Buffered, x: Tensor) -> Tensor:
    """An average of inputs, whose mean over the whole batch is computed once a step."""
    net.temperature.mul_(0.5).add_(x.mean(), alpha=0.5)
    return net.last(torch.tanh(net.first(x)) * net.temperature.sum())


def averaged(net: Buffered, x: Tensor) -> Tensor:
    """An average of weights, as a teacher has it."""
    with torch.no_grad():
        net.teacher.mul_(0.9).add_(net.first.weight, alpha=0.1)
    return net.last(torch.tanh(net.first(x))) + F.linear(x, net.teacher)


def number_of_rows(net: Buffered, x: Tensor) -> Tensor:
    """The number of rows so far, to which each microbatch adds its own."""
    net.steps += len(x)
    return net.last(torch.tanh(net.first(x)))


class SpectralNorms(nn.Module):
    """The vectors of a power iteration follow from the weight alone. Cuts may fall into the iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.middle(torch.tanh(self.first(x)))))


LAYOUTS: list[dict[str, Any]] = [
    {"devices": 2},
    {"devices": 2, "schedule": "gpipe", "recompute": "full"},
    {"devices": 4, "replicas": 2},
    {"devices": 6, "replicas": 2, "schedule": "zb-h1"},
]


def check(model: nn.Module, **options: Any) -> pipec.Pipeline:
    """Compare steps with eager torch; the script has the optimizer, or with ``shard`` the pipeline."""
    eager = copy.deepcopy(model)
    factory = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    if "shard" in options:
        options["optimizer"] = factory
    pipe = pipec.compile(model, loss_fn=F.mse_loss, microbatches=4, **options)
    optimizers = [factory(each.parameters()) for each in (eager, model)[: 1 + ("shard" not in options)]]
    for rows in SIZES:
        x, y = torch.randn(2, rows, 8, dtype=torch.float64)
        found, expected = pipe.step(x, target=y), F.mse_loss(eager(x), y)
        expected.backward()
        torch.testing.assert_close(found, expected.detach())
        for (fqn, own), other in zip(model.named_parameters(), eager.parameters(), strict=True):
            if "shard" not in options:
                torch.testing.assert_close(own.grad, other.grad, msg=fqn)
        for each in optimizers:
            each.step()
            each.zero_grad()
        for fqn, value in pipe.state_dict().items():
            torch.testing.assert_close(value, eager.state_dict()[fqn], msg=fqn)
    return pipe


@pytest.mark.filterwarnings("error::pipec.errors.PipecWarning")
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("forward", [counting, input_mean, averaged, None])
def test_they_change_once_a_step(forward: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    check((Buffered(forward) if forward else SpectralNorms()).double(), **options)


@pytest.mark.parametrize("shard", [None, "optimizer", "gradients", "parameters"])
def test_a_gradient_that_comes_from_another_stage_alone_is_summed_over_replicas(shard: str | None) -> None:
    """The owner of the weight makes vectors of it without a gradient; another stage uses it."""
    torch.manual_seed(0)
    pipe = check(SpectralNorms().double(), devices=6, replicas=2, shard=shard)
    weight = "middle.parametrizations.weight.original"
    assert any(weight in stage.borrowed_parameters for stage in pipe.plan.stages)


def test_what_follows_from_rows_changes_with_each_microbatch_and_a_warning_says_so() -> None:
    model = Buffered(number_of_rows)
    pipe = pipec.compile(model, loss_fn=F.mse_loss, microbatches=4, devices=2)
    x, y = torch.randn(2, 16, 8)
    with pytest.warns(PipecWarning, match="changes steps: once for each of the 4 microbatches"):
        pipe.step(x, target=y)
    assert model.steps == 16
