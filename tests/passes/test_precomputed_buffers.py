"""What follows from buffers alone is computed once a step, by each stage that reads it."""

import copy
import functools

import pytest
import torch
from slow_params import slow
from torch import Tensor, nn
from unsplit_reference import StepResult, assert_equal, unsplit_step

import pipec
from pipec.compiler.staged_graph import StagedGraph
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.follow_placement import FollowPlacement

WIDTH, TOKENS, ROWS = 8, 6, 8


class Rotary(nn.Module):
    """Angles of positions, which every layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.logspace(0, -2, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        turned = (torch.arange(x.shape[1])[:, None] * self.frequencies).cos()
        for layer in self.layers:
            x = torch.tanh(layer(x * turned))
        return x.square().mean()


def test_angles_are_computed_once_a_step_and_never_sent() -> None:
    torch.manual_seed(0)
    model = Rotary()
    eager = copy.deepcopy(model)
    pipe = pipec.compile(model, devices=2, microbatches=2)
    for _ in range(2):
        x = torch.randn(ROWS, TOKENS, WIDTH)
        found, expected = pipe.step(x), unsplit_step(eager, {"x": x}, [ROWS // 2] * 2)
        assert_equal(StepResult.of(found, model), StepResult.of(expected, eager))
        for each in (model, eager):
            each.frequencies.mul_(2)  # between steps it may change
    sent = [value.name for link in pipe.plan.links for value in link.values]
    assert not [name for name in sent if name.startswith("turned")]
    require_precomputed(pipe, "torch.cos(")


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
    model = nn.Sequential(nn.Embedding(16, WIDTH), Rotary())
    eager = copy.deepcopy(model)
    optimizer = functools.partial(torch.optim.SGD, lr=0.0)
    pipe = pipec.compile(model, devices=2, microbatches=2, schedule=schedule, optimizer=optimizer)
    batches = [torch.randint(16, (ROWS, length)) for length in (5, 8, 5, 3, 3, 8)]
    found = torch.stack([*pipe.stream(batches)])
    expected = torch.stack([eager(batch).detach() for batch in batches])
    torch.testing.assert_close(found, expected)
    require_precomputed(pipe, "def precompute(buffers, t, device):")


class Scaled(nn.Module):
    """What is between two layers reads a buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
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
    model, x = Rotary(), torch.randn(ROWS, TOKENS, WIDTH)
    expected = model(x)
    pipe = pipec.compile(model, devices=["cpu", "cpu:0"], microbatches=2)
    torch.testing.assert_close(pipe.step(x), expected.detach())
    assert [len(stage.buffers) for stage in pipe.plan.stages] == [1, 0]
