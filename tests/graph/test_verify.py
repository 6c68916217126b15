"""The rules of the graph verifier: each is broken on purpose, and its message names pass, stage and node."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from pipec import ops
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.compiler.pass_list import CompilerOptions, make_passes
from pipec.errors import VerifyError
from pipec.graph import TrainingGraph, is_forward, recv, send
from pipec.graph.invariants import verify_graph
from pipec.hardware.devices import DEVICES
from pipec.hardware.topology import equal_devices
from pipec.ir import Mode, Phase
from pipec.passes import run_passes
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.mark_recompute import MarkRecompute


class Counted(nn.Module):
    """Two layers, and a buffer that the second half changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(torch.tanh(self.first(x))))


@pytest.fixture(scope="module")
def compiled() -> TrainingGraph:
    call = ModelCall((torch.randn(4, 4),), {}, torch.randn(4, 2))
    graph = capture(CaptureRequest(Counted(), nn.functional.mse_loss, Mode.TRAIN, call))
    device = DEVICES["cpu"]
    devices = equal_devices(2, device.link)
    return run_passes(
        graph,
        make_passes(CompilerOptions(device, devices), AssignStages(CutStages(devices, 4)), MarkRecompute()),
    )


def node_where(graph: TrainingGraph, test: Callable[[fx.Node], bool]) -> fx.Node:
    return next(node for node in graph.nodes if test(node))


def drop_operator(graph: TrainingGraph) -> None:
    del node_where(graph, is_forward).meta["operator"]


def read_the_backward(graph: TrainingGraph) -> None:
    backward = node_where(graph, lambda node: not is_forward(node))
    with graph.module.graph.inserting_after(backward):
        node = graph.module.graph.call_function(torch.ops.aten.relu.default, (backward,))
    node.meta = {**backward.meta, "phase": Phase.FORWARD}


def drop_stage(graph: TrainingGraph) -> None:
    del node_where(graph, is_forward).meta["stage"]


def forward_goes_back(graph: TrainingGraph) -> None:
    node_where(graph, lambda n: n.target is send and is_forward(n)).meta["stage"] = 1
    node_where(graph, lambda n: n.target is recv and is_forward(n)).meta["stage"] = 0


def gradient_goes_forward(graph: TrainingGraph) -> None:
    node_where(graph, lambda n: n.target is send and not is_forward(n)).meta["stage"] = 0
    node_where(graph, lambda n: n.target is recv and not is_forward(n)).meta["stage"] = 1


def move_a_changed_buffer(graph: TrainingGraph) -> None:
    mean = next(node for role, node in graph.outputs if getattr(role, "fqn", "") == "norm.running_mean")
    mean.meta["stage"] = 2


def second_gradient(graph: TrainingGraph) -> None:
    output = graph.module.graph.output_node()
    values = list(output.args[0])
    named = {role.fqn: i for i, role in enumerate(graph.results) if hasattr(role, "fqn")}
    object.__setattr__(
        graph,
        "results",
        tuple(
            graph.results[named["second.weight"]] if i == named["second.bias"] else role
            for i, role in enumerate(graph.results)
        ),
    )
    output.args = (tuple(values),)


def gradient_elsewhere(graph: TrainingGraph) -> None:
    position = next(i for i, role in enumerate(graph.results) if getattr(role, "fqn", "") == "first.weight")
    object.__setattr__(
        graph,
        "results",
        tuple(role if i != position else type(role)("norm.weight") for i, role in enumerate(graph.results)),
    )


def skip_the_message(graph: TrainingGraph) -> None:
    received = node_where(graph, lambda node: node.target is recv)
    received.replace_all_uses_with(received.all_input_nodes[0].all_input_nodes[0])


def lose_a_recv(graph: TrainingGraph) -> None:
    received = node_where(graph, lambda node: node.target is recv)
    copy_of = graph.module.graph.node_copy(received)
    received.append(copy_of)
    copy_of.meta = dict(received.meta)


def another_target(graph: TrainingGraph) -> None:
    sent = node_where(graph, lambda node: node.target is send)
    sent.args = (sent.args[0], 7)


def receive_what_was_not_sent(graph: TrainingGraph) -> None:
    received = node_where(graph, lambda node: node.target is recv)
    received.args = (received.all_input_nodes[0].all_input_nodes[0],)


def another_type(graph: TrainingGraph) -> None:
    received = node_where(graph, lambda node: node.target is recv)
    received.meta["val"] = received.meta["val"].to(torch.float64)


def read_a_later_segment(graph: TrainingGraph) -> None:
    node_where(graph, is_forward).meta["segment"] = 1


def collective_within_a_segment(graph: TrainingGraph) -> None:
    node_where(graph, lambda node: node.target is torch.ops.aten.tanh.default).target = ops.ALL_REDUCE


def collective_in_weight_gradients(graph: TrainingGraph) -> None:
    def ends(node: fx.Node) -> bool:
        read_by = [user.op for user in node.users]
        return node.meta["phase"] is Phase.BACKWARD_WEIGHT and read_by == ["output"]

    node = node_where(graph, ends)
    node.target, node.args, node.kwargs = ops.ALL_REDUCE, tuple(node.all_input_nodes[:1]), {}
    node.meta["segment"] = 1


BREAKS = {
    drop_operator: "has no 'operator'",
    read_the_backward: "runs in the forward but reads",
    drop_stage: "belongs to no stage",
    forward_goes_back: "a forward edge goes back",
    gradient_goes_forward: "a gradient goes forward",
    move_a_changed_buffer: "reads buffer norm.running_mean, which stage 2 changes",
    second_gradient: "is a second gradient of second.weight on the same stage",
    gradient_elsewhere: "is the gradient of norm.weight, but stage 0 does not hold that parameter",
    skip_the_message: "without a send and a recv",
    lose_a_recv: "must be received exactly once, but has 2 users",
    another_target: "goes to stage 7 but stage",
    receive_what_was_not_sent: "without a send and a recv|receives something that was not sent|exactly once",
    another_type: r"expects torch.float64\[.*\] but .* carries torch.float32",
    read_a_later_segment: "runs in segment 0 but reads .* of segment 1",
    collective_within_a_segment: "begins no segment: it is in segment 0, and reads",
    collective_in_weight_gradients: "waits for other replicas in the weight gradient",
}


@pytest.mark.parametrize(("damage", "message"), BREAKS.items(), ids=[damage.__name__ for damage in BREAKS])
def test_a_broken_graph_is_refused(
    compiled: TrainingGraph, damage: Callable[[TrainingGraph], None], message: str
) -> None:
    graph = copied(compiled)
    verify_graph(graph)
    damage(graph)
    with pytest.raises(VerifyError, match=message) as caught:
        verify_graph(graph, after="a test")
    assert "after 'a test'" in str(caught.value)
    assert "> [" in str(caught.value)  # the node's own line among its neighbours


def copied(graph: TrainingGraph) -> TrainingGraph:
    """A copy of the graph whose nodes can be damaged."""
    made = fx.Graph()
    made.output(made.graph_copy(graph.module.graph, {}))
    for new, old in zip(made.nodes, graph.module.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    twin = copy.copy(graph)
    object.__setattr__(twin, "module", fx.GraphModule({}, made))
    return twin
