"""Stages whose functions are replayed as CUDA graphs, by an emulation, against the same ones as source."""

import copy
from collections.abc import Iterator

import pytest
import torch
from replayed import ReplayedGraphs
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.runtime import execution

X, Y = torch.linspace(-1, 1, 144).view(18, 8), torch.linspace(0, 1, 72).view(18, 4)


class Model(nn.Module):
    """It draws, changes buffers, and reads a weight of the first stage in the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.first(x)).relu(), 0.2, self.training)
        for block in self.blocks:
            x = x + F.dropout(block(x).tanh(), 0.1, self.training)
        return self.last(F.linear(x, self.first.weight.t()))


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ReplayedGraphs]]:
    """Graphs on CPUs."""
    monkeypatch.setattr(execution, "CudaGraphs", ReplayedGraphs)
    monkeypatch.setattr(execution, "require_gpus", lambda devices: None)
    ReplayedGraphs.num_recorded = ReplayedGraphs.num_replayed = 0
    return ReplayedGraphs


def trained(kernels: str, **options: object) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The losses of steps, of which some add up their gradients, and what has become of the model."""
    torch.manual_seed(0)
    model = Model()
    pipe = pipec.compile(model, ["cpu"] * 2, microbatches=6, loss_fn=F.mse_loss, kernels=kernels, **options)
    sgd, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(4):
        losses.append(pipe.step(X + number, target=Y))
        if number % 2:
            sgd.step()
            sgd.zero_grad()
    losses.append(pipe.step(X[:15], target=Y[:15]))
    gradients = {f"{name}.grad": x.grad for name, x in model.named_parameters() if x.grad is not None}
    return losses, {**copy.deepcopy(model.state_dict()), **gradients}


SCHEDULES = {
    "1f1b": {"schedule": "1f1b"},
    "gpipe": {"schedule": "gpipe", "recompute": "full"},
    "zero bubble": {"schedule": "zb-h1"},
    "interleaved": {"schedule": "interleaved-1f1b", "recompute": "full"},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_replayed_graphs_have_the_bits_of_their_source(replayed: type[ReplayedGraphs], name: str) -> None:
    options = SCHEDULES[name]
    found, expected = trained("cudagraphs", **options), trained("source", **options)
    assert replayed.num_replayed > 2 * replayed.num_recorded > 0
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
