"""Models of equal blocks, and their captures with and without blocks that are copies of others."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from pipec.capture import tracer
from pipec.capture.model_call import ModelCall
from pipec.capture.repeated_blocks import RepeatedBlocks, constants_key, instantiate_blocks, value_key
from pipec.graph import TrainingGraph
from pipec.ir import Mode

WIDTH, ROWS = 4, 3

META = ("role", "operator", "phase", "constant", "random_seed", "updated", "has_data_dependent_size")


class Block(nn.Module):
    """A residual block. ``bias`` is added to what it computes, if there is one."""

    def __init__(self, p: float = 0.1, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = norm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        hidden = self.norm(x)
        if bias is not None:
            hidden = hidden + bias
        return x + self.drop(nn.functional.gelu(self.linear(hidden)))


class Writing(Block):
    """Writes into its argument, a fresh copy of which it returns."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        hidden = x.clone()
        hidden += super().forward(x, bias)
        hidden[:, 0] = hidden[:, 1] * 2
        return hidden


class Stack(nn.Module):
    """Embeds, calls all blocks one after the other, and projects."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        head: Tensor = self.head(x)
        return head


class Biased(Stack):
    """All blocks read a value that has a gradient, as those of T5 read their relative positions."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, bias = self.embed(x), self.embed(x).tanh()
        for block in self.blocks:
            hidden = block(hidden, bias)
        head: Tensor = self.head(hidden)
        return head


class Collected(Stack):
    """The head reads what all blocks return."""

    def forward(self, x: Tensor) -> Tensor:
        found = [self.embed(x)]
        for block in self.blocks:
            found.append(block(found[-1]))
        head: Tensor = self.head(torch.stack(found).mean(0))
        return head


class Crossing(Stack):
    """An encoder, and a decoder whose blocks all read what the encoder returns.

    The first of these is another one, because its argument has no gradient.
    """

    def __init__(self, encoder: list[nn.Module], decoder: list[nn.Module]) -> None:
        super().__init__(*encoder)
        self.decoder = nn.ModuleList(decoder)

    def forward(self, x: Tensor) -> Tensor:
        encoded, hidden = super().forward(x), x
        for block in self.decoder:
            hidden = block(hidden, encoded)
        return hidden


def call() -> ModelCall:
    x = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    return ModelCall((x,), {}, x * 0.5)


def captured_both_ways(
    patch: pytest.MonkeyPatch, capture: Callable[[], TrainingGraph]
) -> tuple[TrainingGraph, TrainingGraph, list[RepeatedBlocks]]:
    """The graph with blocks that are copies, the whole one, and the runs that have such blocks."""
    runs = list[RepeatedBlocks]()

    def noted(graph: TrainingGraph, found: list[RepeatedBlocks]) -> TrainingGraph:
        graph = instantiate_blocks(graph, found)
        runs.extend(found)
        return graph

    with patch.context() as patched:
        patched.setattr(tracer, "instantiate_blocks", noted)
        assembled = capture()
    with patch.context() as patched:
        patched.setattr(tracer, "find_repeated_blocks", lambda *_: [])
        whole = capture()
    return assembled, whole, runs


def capture_stack(model: nn.Module, mode: Mode = Mode.TRAIN) -> TrainingGraph:
    loss_fn = None if mode is Mode.FORWARD else nn.functional.mse_loss
    return tracer.capture(tracer.CaptureRequest(model, loss_fn, mode, call()))


def assert_same_graph(graph: TrainingGraph, other: TrainingGraph) -> None:
    """Compare two graphs node by node; only the names of nodes may differ."""
    rows, others = [*_nodes(graph.module.graph)], [*_nodes(other.module.graph)]
    assert len(rows) == len(others)
    for row, expected in zip(rows, others, strict=True):
        assert row == expected
    for graph_of in (graph, other):
        graph_of.module.graph.lint()
    assert [*map(_nodes_of, _other_graphs(graph))] == [*map(_nodes_of, _other_graphs(other))]
    for name in (
        *("mode", "operators", "results", "batch_size", "batch", "guards", "variables", "planned_sizes"),
        *("variable_symbols", "data_dependent_sizes", "findings", "first_collective", "squeezed_at", "logs"),
        *("output_spec", "paths", "axes", "training"),
    ):
        assert getattr(graph, name) == getattr(other, name), name
    assert [*graph.constants] == [*other.constants]


def _other_graphs(graph: TrainingGraph) -> list[fx.Graph]:
    return [each for each in (graph.batch_counts, graph.input_branches.graph) if each is not None]


def _nodes_of(graph: fx.Graph) -> list[Any]:
    return [*_nodes(graph)]


def _nodes(graph: fx.Graph) -> Iterator[Any]:
    """Everything that is known of each node."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        read: list[int] = []
        fx.map_arg((node.args, node.kwargs), lambda source, read=read: read.append(place[source]))  # type: ignore[misc]
        target = node.target if node.op.startswith("call") else None
        meta = [node.meta.get(key) for key in META]
        yield (
            *(node.op, target, read, constants_key((node.args, node.kwargs)), meta),
            value_key(node.meta.get("val")),
        )
