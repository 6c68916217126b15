"""Stages whose functions are replayed as CUDA graphs, by an emulation, against the same ones as source."""

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from bare_programs import lower
from handwritten_stages import make_plan
from replayed_cuda_graphs import ReplayedGraphs
from slow_params import slow_but
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.ir import Link, Payload, ShardingLevel, SyncSpec, Value, Variable
from pipec.ir.sync_spec import Stream
from pipec.runtime.stages.cuda_graphs import graph_slots, require_recordable
from pipec.runtime.step import execution, ranks
from pipec.schedules import make_schedule

X, Y = torch.linspace(-1, 1, 144).view(18, 8), torch.linspace(0, 1, 72).view(18, 4)


class Model(nn.Module):
    """It draws, changes buffers, and reads a weight of the first stage in the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.register_buffer("seen", torch.zeros(16))
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(self.first(x)).relu(), 0.2, self.training)
        for block in self.blocks:
            x = x + F.dropout(block(x).tanh(), 0.1, self.training) * (1 + self.seen)
        self.seen.lerp_(x.detach().mean(0), 0.1)
        return self.last(F.linear(x, self.first.weight.t()))


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ReplayedGraphs]]:
    """Graphs on CPUs, and memory that is NaN, or the largest number, until something is written there."""
    monkeypatch.setattr(execution, "CudaGraphRecorder", ReplayedGraphs)
    monkeypatch.setattr(ranks, "require_gpus", lambda devices: None)
    ReplayedGraphs.num_recorded = ReplayedGraphs.num_replayed = 0
    torch.use_deterministic_algorithms(True)
    yield ReplayedGraphs
    torch.use_deterministic_algorithms(False)


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
    "1f1b": {"schedule": "1f1b", "precision": "bf16-mixed"},
    "zero bubble": {"schedule": "zb-h1"},
    "interleaved": {"schedule": "interleaved-1f1b", "recompute": "full"},
}


@pytest.mark.parametrize("name", slow_but(SCHEDULES, "1f1b"))
def test_replayed_graphs_have_the_bits_of_their_source(replayed: type[ReplayedGraphs], name: str) -> None:
    options = SCHEDULES[name]
    found, expected = trained("cudagraphs", **options), trained("source", **options)
    assert replayed.num_replayed > 2 * replayed.num_recorded > 0
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def small(**options: object) -> tuple[nn.Module, pipec.Pipeline]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    options = {"microbatches": 3, "loss_fn": F.mse_loss, "kernels": "cudagraphs"} | options
    return model, pipec.compile(model, ["cpu"] * 2, **options)


def test_indices_are_there_when_a_graph_is_recorded(replayed: type[ReplayedGraphs]) -> None:
    """On a GPU an index that is none ends the process."""
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 4))
    pipe = pipec.compile(model, ["cpu"] * 2, microbatches=2, loss_fn=F.mse_loss, kernels="cudagraphs")
    x = torch.arange(8)
    torch.testing.assert_close(pipe.step(x, target=Y[:8]), F.mse_loss(model(x), Y[:8]))


def test_graphs_are_recorded_anew_where_weights_have_moved(replayed: type[ReplayedGraphs]) -> None:
    """A graph reads the memory of weights, which loading with ``assign`` replaces."""
    model, pipe = small()
    pipe.step(X, target=Y)
    num_recorded = replayed.num_recorded
    model[0].weight.data = -model[0].weight.data
    loss = pipe.step(X, target=Y)
    torch.testing.assert_close(loss, F.mse_loss(model(X), Y))
    assert num_recorded < replayed.num_recorded < 2 * num_recorded, "those of the other stage are right"
    pipe.step(X, target=Y)
    pipe.step(X[:9], target=Y[:9])


class Selecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](x[x[:, 0] > 0])


def test_what_cannot_be_recorded_is_told_before_anything_is_sent(replayed: type[ReplayedGraphs]) -> None:
    model = Selecting()
    options = {"loss_fn": lambda output, _: output.square().sum(), "kernels": "cudagraphs"}
    pipe = pipec.compile(model, ["cpu"] * 2, microbatches=2, **options)
    with pytest.raises(
        pipec.ExecutionError,
        match=r"cannot record forward of stage 1.* RuntimeError: operation not permitted .*kernels='source'",
    ):
        pipe.step(X, target=Y)
    assert model.layers[1].weight.grad is None


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if x.isnan().any():
            return x
        return self.layers[1](x)[:, :4]


PLAN = make_plan(make_schedule("1f1b", 3, 4))
CUDA = {rank: torch.device("cuda", rank) for rank in range(4)}
MOVING = {
    "asynchronous schedule": replace(PLAN, sync_spec=SyncSpec(stream=Stream(1, 1))),
    "gathered into other memory": replace(PLAN, sync_spec=SyncSpec(shard=ShardingLevel.PARAMETERS)),
    "offloaded values": replace(PLAN, stages=(replace(PLAN.stages[0], offloaded=(0,)),)),
    "varies between calls": replace(PLAN, variables=(Variable("alpha", 1, "args[1]", None),)),
    "replicas of stage 1 in one process": replace(PLAN, placement=((0,), (1, 2))),
}


@pytest.mark.parametrize("why", MOVING)
def test_plans_that_move_memory_are_refused(why: str) -> None:
    require_recordable(PLAN, [], CUDA)
    with pytest.raises(pipec.InputError, match=f"kernels='cudagraphs' is not possible here: .*{why}"):
        require_recordable(MOVING[why], [], CUDA)


def test_what_values_tell_is_refused(replayed: type[ReplayedGraphs]) -> None:
    pipe = pipec.compile(Branches(), ["cpu"] * 2, loss_fn=F.mse_loss, kernels="cudagraphs")
    with pytest.raises(
        pipec.InputError, match=r"stage 0 has a data-dependent operator \(check_branch in stage_0.py\)"
    ):
        pipe.step(X, target=Y)


def test_cpus_are_refused() -> None:
    with pytest.raises(pipec.InputError, match="needs CUDA devices, but devices has cpu, cpu"):
        pipec.compile(nn.Linear(8, 4), ["cpu"] * 2, kernels="cudagraphs")


def test_slots_are_as_many_as_microbatches_in_flight() -> None:
    """One is taken again only when the microbatch that had it is through."""
    link = (Link(0, 1, Payload.ACTIVATION, (Value("x", "float32", ("b",)),)),)
    programs = lower(make_schedule("1f1b", 2, 4), link)
    found = [graph_slots(program) for program in programs]
    assert found[0] == {(0, 0): 0, (0, 1): 1, (0, 2): 0, (0, 3): 1}
    assert found[1] == {(1, microbatch): 0 for microbatch in range(4)}
