"""Large operators are taken apart, so that stages are cut inside of them."""

import copy

import pytest
import torch
from compile_variants import captured, cut
from huggingface_models import encoder
from torch import Tensor, nn
from unsplit_reference import StepResult, assert_equal, unsplit_step

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


@pytest.mark.slow
def test_stages_are_even_and_have_the_bits_of_eager() -> None:
    """Another graph is taken apart where parameters are: what runs forward alone borrows none."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(ROWS, TOKENS, WIDTH)
    eager = copy.deepcopy(model)
    pipe = pipec.compile(model, devices=4, microbatches=2)
    found, expected = pipe.step(x), unsplit_step(eager, {"x": x}, [ROWS // 2] * 2)
    assert_equal(StepResult.of(found, model), StepResult.of(expected, eager))
    seconds = [sum(stage.cost.seconds.values()) for stage in pipe.plan.stages]
    assert max(seconds) < 1.3 * sum(seconds) / 4
    (inside,) = [s.parameters for s in pipe.plan.stages if "attention.in_proj_weight" in s.parameters]
    assert "attention.out_proj.weight" not in inside, "the call was cut"
    with torch.no_grad():
        assert torch.equal(pipe(x), expected)
    graphs = [staged.graph for staged in pipe._executions.compiler.cache.staged_graphs]
    homes = {graph.mode: parameter_stages(graph) for graph in graphs}
    assert homes[Mode.FORWARD] == homes[Mode.TRAIN]


def test_a_transposed_weight_is_where_it_is_read() -> None:
    """The verifier says so: the gradient of the weight is made where that is."""
    model = captured(encoder)
    far_apart = equal_devices(8, LinkModel(1e9, 1e-3))
    graph = cut(model, AssignStages(CutStages(far_apart, model.graph.batch_size)), frozenset()).graph
    assert graph.num_stages == 8
