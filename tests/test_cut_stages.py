"""The pass that cuts: what it tells the planner, and what it makes of the answer."""

import pytest
import torch
from torch import nn

from pipec.capture.call import Call
from pipec.capture.tracer import capture
from pipec.errors import InfeasibleError
from pipec.graph import TrainingGraph, copy_graph
from pipec.hardware.devices import DEVICES
from pipec.hardware.topology import alike
from pipec.ir import Mode
from pipec.passes import run_passes
from pipec.passes.annotate_cost import AnnotateCost
from pipec.passes.cut_stages import CutStages
from pipec.passes.simplify import Simplify

ROWS, WIDTH = 4, 64
LAYER_BYTES = 4 * WIDTH * WIDTH


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    """Four linear layers, of which the first is frozen."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    layers[0].weight.requires_grad_(False)
    x = torch.randn(ROWS, WIDTH)
    captured = capture(nn.Sequential(*layers), nn.functional.mse_loss, Mode.TRAIN, Call((x,), {}, x))
    return run_passes(captured, [Simplify(), AnnotateCost(DEVICES["cpu"])])


def cut(graph: TrainingGraph, memory_bytes: float, in_flight: tuple[int, ...] = (0, 0)) -> TrainingGraph:
    devices = alike(2, DEVICES["cpu"].link, memory_bytes)
    return CutStages(devices, ROWS, in_flight)(copy_graph(graph))


def test_devices_that_are_alike_are_visited_in_order(graph: TrainingGraph) -> None:
    assert cut(graph, float("inf")).ranks == ()


def test_a_rank_holds_weights_and_the_gradients_of_what_is_trained(graph: TrainingGraph) -> None:
    """A frozen layer counts once and a trained one twice: half of the layers need three or four times one."""
    cut(graph, 4 * LAYER_BYTES)
    with pytest.raises(InfeasibleError, match=f"stage 0: {5 * LAYER_BYTES} bytes resident"):
        cut(graph, 4 * LAYER_BYTES - 1)


def test_a_rank_holds_what_is_saved_for_each_microbatch_in_flight(graph: TrainingGraph) -> None:
    cut(graph, 5 * LAYER_BYTES, in_flight=(2, 1))
    with pytest.raises(InfeasibleError, match="1000 microbatches in flight"):
        cut(graph, 5 * LAYER_BYTES, in_flight=(1000, 1))
