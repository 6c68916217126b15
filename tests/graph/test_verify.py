"""The rules of the graph verifier: each is broken on purpose, and its message names pass, stage and node."""

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from pipec import ops
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.compiler.pass_list import CompilerOptions, make_passes
from pipec.errors import VerifyError
from pipec.graph import Gradient, TrainingGraph, copy_graph, is_forward, recv, send
from pipec.graph.invariants import verify_graph
from pipec.hardware.devices import DEVICES
from pipec.hardware.topology import equal_devices
from pipec.ir import Mode, Phase
from pipec.passes import run_passes
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.mark_recompute import MarkRecompute

LAYERS = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2), nn.BatchNorm1d(2))
"""Two layers, and buffers that the second half changes."""


@pytest.fixture(scope="module")
def compiled() -> TrainingGraph:
    call = ModelCall((torch.randn(4, 4),), {}, torch.randn(4, 2))
    graph = capture(CaptureRequest(LAYERS, nn.functional.mse_loss, Mode.TRAIN, call))
    device = DEVICES["cpu"]
    devices = equal_devices(2, device.link)
    return run_passes(
        graph,
        make_passes(CompilerOptions(device, devices), AssignStages(CutStages(devices, 4)), MarkRecompute()),
    )


def sends(node: fx.Node) -> bool:
    return node.target is send


def receives(node: fx.Node) -> bool:
    return node.target is recv


def runs_backward(node: fx.Node) -> bool:
    return not is_forward(node)


def makes_a_weight_gradient(node: fx.Node) -> bool:
    read_by = [user.op for user in node.users]
    return node.meta.get("phase") is Phase.BACKWARD_WEIGHT and read_by == ["output"]


def value_of(received: fx.Node) -> fx.Node:
    return received.all_input_nodes[0].all_input_nodes[0]


def read_in_the_forward(graph: TrainingGraph, node: fx.Node) -> None:
    with graph.module.graph.inserting_after(node):
        reader = graph.module.graph.call_function(torch.ops.aten.relu.default, (node,))
    reader.meta = {**node.meta, "phase": Phase.FORWARD}


def turn(graph: TrainingGraph, sent: fx.Node) -> None:
    """Let a message go to where it comes from."""
    (received,) = sent.users
    sent.meta["stage"], received.meta["stage"] = received.meta["stage"], sent.meta["stage"]


def move_a_changed_buffer(graph: TrainingGraph, node: fx.Node) -> None:
    mean = next(node for role, node in graph.outputs if getattr(role, "fqn", "") == "3.running_mean")
    mean.meta["stage"] = 2


def rename_gradient(graph: TrainingGraph, before: str, after: str) -> None:
    roles = [Gradient(after) if role == Gradient(before) else role for role in graph.results]
    object.__setattr__(graph, "results", tuple(roles))


def receive_twice(graph: TrainingGraph, received: fx.Node) -> None:
    copy_of = graph.module.graph.node_copy(received)
    received.append(copy_of)
    copy_of.meta = dict(received.meta)


def reduce_in_weight_gradients(graph: TrainingGraph, node: fx.Node) -> None:
    node.target, node.args, node.kwargs = ops.ALL_REDUCE, tuple(node.all_input_nodes[:1]), {}
    node.meta["segment"] = 1


Damage = Callable[[TrainingGraph, fx.Node], object]

BREAKS: dict[str, tuple[Callable[[fx.Node], bool], Damage]] = {
    "has no 'operator'": (is_forward, lambda _, node: node.meta.pop("operator")),
    "runs in the forward but reads": (runs_backward, read_in_the_forward),
    "belongs to no stage": (is_forward, lambda _, node: node.meta.pop("stage")),
    "a forward edge goes back": (lambda node: sends(node) and is_forward(node), turn),
    "a gradient goes forward": (lambda node: sends(node) and not is_forward(node), turn),
    "reads buffer 3.running_mean, which stage 2 changes": (is_forward, move_a_changed_buffer),
    "is a second gradient of 2.weight on the same stage": (
        is_forward,
        lambda graph, _: rename_gradient(graph, "2.bias", "2.weight"),
    ),
    "is the gradient of 3.weight, but stage 0 does not hold that parameter": (
        is_forward,
        lambda graph, _: rename_gradient(graph, "0.weight", "3.weight"),
    ),
    "without a send and a recv": (receives, lambda _, node: node.replace_all_uses_with(value_of(node))),
    "must be received exactly once, but has 2 users": (receives, receive_twice),
    "goes to stage 7 but stage": (sends, lambda _, node: node.update_arg(1, 7)),
    "without a send and a recv|receives something that was not sent|exactly once": (
        receives,
        lambda _, node: node.update_arg(0, value_of(node)),
    ),
    r"expects torch.float64\[.*\] but .* carries torch.float32": (
        receives,
        lambda _, node: node.meta.update(val=node.meta["val"].to(torch.float64)),
    ),
    "runs in segment 0 but reads .* of segment 1": (is_forward, lambda _, node: node.meta.update(segment=1)),
    "begins no segment: it is in segment 0, and reads": (
        lambda node: node.target is torch.ops.aten.tanh.default,
        lambda _, node: setattr(node, "target", ops.ALL_REDUCE),
    ),
    "waits for other replicas in the weight gradient": (makes_a_weight_gradient, reduce_in_weight_gradients),
}
"""By message of the verifier: the first node of a kind, and the damage to it or to its graph."""


@pytest.mark.parametrize("message", BREAKS)
def test_a_broken_graph_is_refused(compiled: TrainingGraph, message: str) -> None:
    graph, (is_meant, damage) = copy_graph(compiled), BREAKS[message]
    verify_graph(graph)
    damage(graph, next(node for node in graph.nodes if is_meant(node)))
    with pytest.raises(VerifyError, match=message) as caught:
        verify_graph(graph, after="a test")
    assert "after 'a test'" in str(caught.value)
    assert "> [" in str(caught.value)  # the node's own line among its neighbours
