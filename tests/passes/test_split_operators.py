"""Large operators are taken apart, so that stages are cut inside of them."""

import copy

import pytest
import torch
from compile_variants import captured, cut
from huggingface_models import encoder
from torch import Tensor, nn

import pipec
from pipec.hardware.devices import LinkModel
from pipec.hardware.topology import equal_devices
from pipec.ir import Mode
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.assignments.follow_placement import parameter_stages

WIDTH, TOKENS, ROWS = 16, 6, 8


class Attention(nn.Module):
    """One call that is a large part of the model, between small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.attention(x, x, x, need_weights=False)[0]
        return nn.functional.cosine_similarity(self.last(x), x, dim=-1).mean()


def step_beside_eager(devices: int) -> tuple[pipec.Pipeline, nn.Module, Tensor]:
    """A pipeline that has made a step, the model that eager torch has trained on the same rows, and these."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(ROWS, TOKENS, WIDTH)
    eager = copy.deepcopy(model)
    pipe = pipec.compile(model, devices=devices, microbatches=2)
    loss = pipe.step(x)
    expected = torch.zeros(())
    for part in x.chunk(2):
        half = eager(part) / 2
        half.backward()
        expected += half.detach()
    assert torch.equal(loss, expected)
    return pipe, eager, x


def require_bits(pipe: pipec.Pipeline, eager: nn.Module) -> None:
    for (fqn, found), wanted in zip(pipe.named_parameters(), eager.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert torch.equal(found.grad, wanted.grad), fqn


@pytest.fixture(scope="module")
def trained() -> tuple[pipec.Pipeline, nn.Module, Tensor]:
    return step_beside_eager(4)


@pytest.mark.slow
def test_stages_are_even_and_gradients_have_the_bits_of_eager(
    trained: tuple[pipec.Pipeline, nn.Module, Tensor],
) -> None:
    pipe, eager, _ = trained
    seconds = [sum(stage.cost.seconds.values()) for stage in pipe.plan.stages]
    assert max(seconds) < 1.3 * sum(seconds) / 4
    homes = [{*stage.parameters} for stage in pipe.plan.stages]
    (inside,) = [home for home in homes if "attention.in_proj_weight" in home]
    assert "attention.out_proj.weight" not in inside, "the call was cut"
    require_bits(pipe, eager)


def test_a_transposed_weight_is_where_it_is_read() -> None:
    """The verifier says so: the gradient of the weight is made where that is."""
    model = captured(encoder)
    far_apart = equal_devices(8, LinkModel(1e9, 1e-3))
    graph = cut(model, AssignStages(CutStages(far_apart, model.graph.batch_size)), frozenset()).graph
    assert graph.num_stages == 8


@pytest.mark.slow
@pytest.mark.slow
def test_another_graph_is_taken_apart_where_parameters_are(
    trained: tuple[pipec.Pipeline, nn.Module, Tensor],
) -> None:
    """What runs forward alone borrows no parameter."""
    pipe, eager, x = trained
    pipe.train()
    with torch.no_grad():
        assert torch.equal(pipe(x), sum(eager(part) for part in x.chunk(2)) / 2)
    graphs = [staged.graph for staged in pipe._executions.compiler.cache.staged_graphs]
    homes = {graph.mode: parameter_stages(graph) for graph in graphs}
    assert homes[Mode.FORWARD] == homes[Mode.TRAIN]
