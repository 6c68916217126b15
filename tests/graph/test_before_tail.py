"""Forwards can run twice if what the tail reads is the same both times."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.graph import TailInput, TrainingGraph, UpdatedBuffer
from pipec.graph.before_tail import needed_by_tail, needed_by_tail_alone, not_repeatable
from pipec.hardware.devices import DEVICES
from pipec.ir import Mode
from pipec.passes import run_passes
from pipec.passes.annotate_cost import AnnotateCost
from pipec.passes.extract_tail import ExtractTail
from pipec.passes.simplify import Simplify


class Contrastive(nn.Module):
    """Rows of two layers; ``between`` is applied to those of the first."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.a, self.between, self.b = nn.Linear(6, 4), between, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        u = self.between(self.a(x))
        with torch.no_grad():
            v = torch.tanh(self.b(x))
        return F.cross_entropy(u @ v.T, torch.arange(len(x)))


class Counting(nn.Module):
    """Divides by the number of its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return torch.tanh(x / self.calls)


def graph_of(between: nn.Module) -> TrainingGraph:
    call = ModelCall((torch.randn(8, 6),), {}, None)
    captured = capture(
        CaptureRequest(
            Contrastive(between), None, Mode.TRAIN, call, symbolic=True, batch=call, may_have_tail=True
        )
    )
    return run_passes(captured, [Simplify(), AnnotateCost(DEVICES["cpu"]), ExtractTail()])


@pytest.mark.parametrize("between", [nn.BatchNorm1d(4), nn.Dropout(), nn.LayerNorm(4)], ids=str)
def test_forwards_that_can_run_twice(between: nn.Module) -> None:
    graph = graph_of(between)
    assert not_repeatable(graph) == ""
    alone = {str(node.target) for node in needed_by_tail_alone(graph)}
    assert "aten.tanh.default" in alone
    assert {node for role, node in graph.outputs if isinstance(role, TailInput)} <= needed_by_tail(graph)


def test_forwards_that_cannot() -> None:
    graph = graph_of(Counting())
    assert not_repeatable(graph) == "they read the buffer between.calls, which they change"
    by_tail = replace(graph, tail_results=(UpdatedBuffer("between.calls"), *graph.tail_results[1:]))
    assert not_repeatable(by_tail) == "they read the buffer between.calls, which the tail changes"


def test_statistics_of_a_batch_norm_that_the_tail_needs_are_read() -> None:
    """As if the rows were multiplied by the new running mean."""
    graph = graph_of(nn.BatchNorm1d(4))
    outputs = graph.module.graph.output_node()
    rows = next(node for role, node in graph.outputs if isinstance(role, TailInput))
    mean = next(n for role, n in graph.outputs if role == UpdatedBuffer("between.running_mean"))
    with graph.module.graph.inserting_before(outputs):
        scaled = graph.module.graph.call_function(torch.ops.aten.mul.Tensor, (rows, mean))
    scaled.meta = dict(rows.meta)
    outputs.args = (tuple(scaled if node is rows else node for node in outputs.args[0]),)  # type: ignore[union-attr]
    assert not_repeatable(graph) == "they read the buffer between.running_mean, which they change"
