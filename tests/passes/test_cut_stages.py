"""The pass that cuts: what it tells the planner, and what it makes of the answer."""

from typing import Any

import pytest
import torch
from awkward_modules import assert_same_bits
from compile_variants import captured
from compile_variants import cut as cut_captured
from forward_modules import model
from huggingface_models import encoder
from torch import Tensor, nn

from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.errors import InfeasibleError
from pipec.graph import Parameter, TrainingGraph, copy_graph
from pipec.hardware.devices import DEVICES, LinkModel
from pipec.hardware.topology import equal_devices
from pipec.ir import Mode, VersionPolicy
from pipec.passes import run_passes
from pipec.passes.annotate_cost import AnnotateCost
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.assignments.follow_placement import parameter_stages
from pipec.passes.assignments.operator_blocks import UpdateCost
from pipec.passes.extract_tail import ExtractTail
from pipec.passes.simplify import Simplify

ROWS, WIDTH = 4, 64
LAYER_BYTES = 4 * WIDTH * WIDTH


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    """Four linear layers, of which the first is frozen."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    layers[0].weight.requires_grad_(False)
    x = torch.randn(ROWS, WIDTH)
    captured = capture(
        CaptureRequest(nn.Sequential(*layers), nn.functional.mse_loss, Mode.TRAIN, ModelCall((x,), {}, x))
    )
    return run_passes(captured, [Simplify(), AnnotateCost(DEVICES["cpu"])])


def cut(graph: TrainingGraph, memory_bytes: float, in_flight: tuple[int, ...] = (0, 0)) -> TrainingGraph:
    devices = equal_devices(2, DEVICES["cpu"].link, memory_bytes)
    return AssignStages(CutStages(devices, ROWS, in_flight))(copy_graph(graph))


def test_devices_that_are_alike_are_visited_in_order(graph: TrainingGraph) -> None:
    assert cut(graph, float("inf")).assignment.ranks == ()


def test_a_rank_holds_weights_gradients_of_what_is_trained_and_what_is_saved(graph: TrainingGraph) -> None:
    """A frozen layer counts once and a trained one twice: half of the layers need three or four times one."""
    cut(graph, 4 * LAYER_BYTES)
    with pytest.raises(InfeasibleError, match=f"stage 0: {5 * LAYER_BYTES} bytes resident"):
        cut(graph, 4 * LAYER_BYTES - 1)
    cut(graph, 5 * LAYER_BYTES, in_flight=(2, 1))
    with pytest.raises(InfeasibleError, match="1000 microbatches in flight"):
        cut(graph, 5 * LAYER_BYTES, in_flight=(1000, 1))


@model(
    layers=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))),
    head=lambda: nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False),
)
def BelowHighest(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A frozen layer that reads how far rows are below the highest ones of the whole batch."""
    hidden = self.layers(x)
    return self.head(hidden - hidden.amax(0)).square().mean()


def test_what_only_the_tail_reads_counts_for_its_stage() -> None:
    """The second stage has a trained layer, which counts twice, and the head."""
    call = ModelCall((torch.randn(ROWS, WIDTH),), {}, None)
    captured = capture(CaptureRequest(BelowHighest(), None, Mode.TRAIN, call, batch=call, may_have_tail=True))
    graph = run_passes(captured, [Simplify(), AnnotateCost(DEVICES["cpu"]), ExtractTail()])
    assert graph.tail is not None
    assert cut(graph, 4 * LAYER_BYTES).assignment.stages[-1] == 1
    with pytest.raises(InfeasibleError, match=f"stage 1: {3 * LAYER_BYTES} bytes resident"):
        cut(graph, 3 * LAYER_BYTES - 1)


def test_updates_after_each_mini_batch_count(graph: TrainingGraph) -> None:
    """The optimizer's state of the second layer takes longer to read and write than all else."""
    state = {"1.weight": 100 * LAYER_BYTES}
    updates = UpdateCost(state, DEVICES["cpu"].memory_bytes_per_second, VersionPolicy.STASHED)
    assert [stages_with(graph, each) for each in (None, updates)] == [[0, 0, 0, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("versions", "expected"),
    [(VersionPolicy.STASHED, (-1, 1)), (VersionPolicy.VERTICAL, (2, 0)), (VersionPolicy.DOUBLE, (1, 0))],
)
def test_versions_of_what_is_trained_count(versions: VersionPolicy, expected: tuple[int, int]) -> None:
    """Beside the weights themselves, on three stages; where they are stashed, one for each in flight."""
    updates = UpdateCost({}, 1e9, versions)
    assert (updates.resident_bytes("w", 1.0, 3), updates.bytes_in_flight(1.0)) == expected


def stages_with(graph: TrainingGraph, updates: UpdateCost | None) -> list[int]:
    """The stage of each layer."""
    cut = CutStages(equal_devices(2, DEVICES["cpu"].link), ROWS, updates=updates)
    made = AssignStages(cut)(copy_graph(graph))
    layers = [node for node in made.arguments if isinstance(node.meta["role"], Parameter)]
    return [min(user.meta["stage"] for user in node.users) for node in layers]


# large operators are taken apart, so that stages are cut inside of them


@model(
    first=lambda: nn.Linear(16, 16),
    attention=lambda: nn.MultiheadAttention(16, 4, batch_first=True),
    last=lambda: nn.Linear(16, 16),
)
def Attention(self: Any, x: Tensor) -> Tensor:
    """One call that is a large part of the model, between small ones."""
    x = self.first(x)
    x = self.attention(x, x, x, need_weights=False)[0]
    return nn.functional.cosine_similarity(self.last(x), x, dim=-1).mean()


@pytest.mark.slow
def test_stages_are_even_and_have_the_bits_of_eager() -> None:
    """Another graph is taken apart where parameters are: what runs forward alone borrows none."""
    torch.manual_seed(0)
    net, x = Attention(), torch.randn(8, 6, 16)
    pipe = assert_same_bits(net, {"x": x}, [4, 4], None, devices=4)
    seconds = [sum(stage.cost.seconds.values()) for stage in pipe.plan.stages]
    assert max(seconds) < 1.3 * sum(seconds) / 4
    (inside,) = [s.parameters for s in pipe.plan.stages if "attention.in_proj_weight" in s.parameters]
    assert "attention.out_proj.weight" not in inside, "the call was cut"
    with torch.no_grad():
        assert torch.equal(pipe(x), pipe.step(x))
    graphs = [staged.graph for staged in pipe._executions.compiler.cache.staged_graphs]
    homes = {graph.mode: parameter_stages(graph) for graph in graphs}
    assert homes[Mode.FORWARD] == homes[Mode.TRAIN]


def test_a_transposed_weight_is_where_it_is_read() -> None:
    """The verifier says so: the gradient of the weight is made where that is."""
    whole, far_apart = captured(encoder), equal_devices(8, LinkModel(1e9, 1e-3))
    graph = cut_captured(whole, AssignStages(CutStages(far_apart, whole.graph.batch_size)), frozenset()).graph
    assert graph.num_stages == 8
