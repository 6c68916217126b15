"""What follows from buffers alone is computed once a step, by each stage that reads it."""

import copy
import functools
from typing import Any

import pytest
import torch
from awkward_modules import Pair
from forward_modules import model
from slow_params import slow
from torch import Tensor, nn

import pipec
from pipec.compiler.staged_graph import StagedGraph
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.follow_placement import FollowPlacement

WIDTH, TOKENS, ROWS = 8, 6, 8


@model(
    frequencies=lambda: nn.Buffer(torch.logspace(0, -2, WIDTH)),
    layers=lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
)
def Rotary(self: Any, x: Tensor) -> Tensor:
    """Angles of positions, which every layer reads."""
    turned = (torch.arange(x.shape[1])[:, None] * self.frequencies).cos()
    for layer in self.layers:
        x = torch.tanh(layer(x * turned))
    return x.square().mean()


def test_angles_are_computed_once_a_step_and_never_sent() -> None:
    torch.manual_seed(0)
    pair = Pair(Rotary())
    for _ in range(2):
        pair.step(torch.randn(ROWS, TOKENS, WIDTH))
        for each in (pair.model, pair.unsplit):
            each.frequencies.mul_(2)  # between steps it may change
    sent = [value.name for link in pair.pipe.plan.links for value in link.values]
    assert not [name for name in sent if name.startswith("turned")]
    require_precomputed(pair.pipe, "torch.cos(")


def require_precomputed(pipe: pipec.Pipeline, code: str) -> None:
    """Each stage has this code before its phases, which compute no angles."""
    for stage in (0, 1):
        before, phases = pipe.source(stage).split("def forward")
        assert code in before
        assert "torch.cos(" not in phases


@pytest.mark.parametrize("schedule", ["1f1b", slow("pipedream-2bw")])
def test_angles_follow_the_length_of_each_batch(schedule: str) -> None:
    """Batches of a stream that read one version of the weights have their own lengths."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(16, WIDTH), Rotary())
    eager = copy.deepcopy(net)
    optimizer = functools.partial(torch.optim.SGD, lr=0.0)
    pipe = pipec.compile(net, devices=2, microbatches=2, schedule=schedule, optimizer=optimizer)
    batches = [torch.randint(16, (ROWS, length)) for length in (5, 8, 5, 3, 3, 8)]
    found = torch.stack([*pipe.stream(batches)])
    expected = torch.stack([eager(batch).detach() for batch in batches])
    torch.testing.assert_close(found, expected)
    require_precomputed(pipe, "def precompute(buffers, t, device):")


@model(
    first=lambda: nn.Linear(WIDTH, WIDTH),
    last=lambda: nn.Linear(WIDTH, WIDTH),
    scale=lambda: nn.Buffer(torch.ones(WIDTH)),
)
def Scaled(self: Any, x: Tensor) -> Tensor:
    """Between two layers, a buffer is read and no parameter."""
    return self.last(self.first(x) / (self.scale + 1).sqrt()).square().mean()


def test_a_buffer_is_prepared_where_another_call_changes_it() -> None:
    """In training the second stage changes the scale, so that it alone has the latest value."""
    pipe = pipec.compile(Scaled(), devices=2, microbatches=2)
    pipe.eval()
    pipe.eval_step(torch.randn(ROWS, WIDTH))
    staged, *_ = pipe._executions.compiler.cache.staged_graphs
    homes = {"first": 0, "last": 1}
    owners = {f"{layer}.{name}": (k,) for layer, k in homes.items() for name in ("weight", "bias")}
    cut = AssignStages(FollowPlacement(2, {**owners, "scale": (1,)}))
    stages = StagedGraph(staged.captured, cut, staged.options).stages(False)
    assert [[node.meta["role"].fqn for node in stage.buffers] for stage in stages] == [[], ["scale"]]
    assert [len(stage.precomputed) for stage in stages] == [0, 1]


def test_a_process_with_several_devices_has_each_buffer_on_one() -> None:
    """Its stages get what follows from a buffer from the one that has it, microbatch by microbatch."""
    torch.manual_seed(0)
    net, x = Rotary(), torch.randn(ROWS, TOKENS, WIDTH)
    expected = net(x)
    pipe = pipec.compile(net, devices=["cpu", "cpu:0"], microbatches=2)
    torch.testing.assert_close(pipe.step(x), expected.detach())
    assert [len(stage.buffers) for stage in pipe.plan.stages] == [1, 0]
