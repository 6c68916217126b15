"""The pass that cuts: what it tells the planner, and what it makes of the answer."""

import re

import pytest
import torch
from torch import nn

from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.errors import InfeasibleError
from pipec.graph import Parameter, TrainingGraph, copy_graph
from pipec.hardware.devices import DEVICES
from pipec.hardware.topology import equal_devices
from pipec.ir import Mode, VersionPolicy
from pipec.passes import run_passes
from pipec.passes.annotate_cost import AnnotateCost
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
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


class BelowHighest(nn.Module):
    """A frozen layer that reads how far rows are below the highest ones of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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


def stages_with(graph: TrainingGraph, updates: UpdateCost | None) -> list[int]:
    """The stage of each layer."""
    cut = CutStages(equal_devices(2, DEVICES["cpu"].link), ROWS, updates=updates)
    made = AssignStages(cut)(copy_graph(graph))
    layers = [node for node in made.arguments if isinstance(node.meta["role"], Parameter)]
    return [min(user.meta["stage"] for user in node.users) for node in layers]


@pytest.mark.parametrize(
    ("versions", "resident", "in_flight"),
    [(VersionPolicy.STASHED, -3, 3), (VersionPolicy.VERTICAL, 3, 0), (VersionPolicy.DOUBLE, 3, 0)],
)
def test_versions_of_what_is_trained_count(
    graph: TrainingGraph, versions: VersionPolicy, resident: int, in_flight: int
) -> None:
    """Beside what is counted without them, in layers: where they are stashed, one for each in flight."""
    none, some = (needed(graph, each) for each in (None, UpdateCost({}, 1e9, versions)))
    assert [(new - old) / LAYER_BYTES for old, new in zip(none, some, strict=True)] == [resident, in_flight]


def needed(graph: TrainingGraph, updates: UpdateCost | None) -> list[int]:
    """The bytes that two stages hold together once, and for each microbatch in flight."""
    devices = equal_devices(2, DEVICES["cpu"].link, 1)
    with pytest.raises(InfeasibleError) as told:
        CutStages(devices, ROWS, (2, 1), updates)(graph)
    found = re.findall(r"(\d+) bytes resident \+ (\d+) saved", str(told.value))
    return [sum(map(int, each)) for each in zip(*found, strict=True)]
