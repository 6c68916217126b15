"""A graph in which equal blocks are copies of one is the graph that torch differentiates as a whole."""

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from slow_params import slow
from torch import Tensor, fx, nn

from pipec.capture import tracer
from pipec.capture.model_call import ModelCall
from pipec.capture.repeated_blocks import (
    IrregularBlocksError,
    RepeatedBlocks,
    constants_key,
    instantiate_blocks,
    value_key,
)
from pipec.graph import TrainingGraph
from pipec.graph.training_graph import copy_graph
from pipec.ir import Mode, Phase

WIDTH = 4


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
    """Writes into a copy of its argument, and returns it."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        hidden = x.clone()
        hidden += super().forward(x, bias)
        hidden[:, 0] = hidden[:, 1] * 2
        return hidden


class Caching(Block):
    """Begins a cache, as attention of transformers does."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.tensor([]), super().forward(x)], 1)


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
    """All blocks read a value that has a gradient, as blocks of T5 read relative positions."""

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
    """An encoder, and a decoder. All blocks of the decoder read what the encoder returns.

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
    x = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)
    return tracer.capture(tracer.CaptureRequest(model, loss_fn, mode, ModelCall((x,), {}, x * 0.5)))


def assert_same_graph(graph: TrainingGraph, other: TrainingGraph) -> None:
    """Compare two graphs node by node; only the names of nodes may differ."""
    pairs = [(graph.module.graph, other.module.graph), (graph.batch_counts, other.batch_counts)]
    pairs.append((graph.input_branches.graph, other.input_branches.graph))
    for one, two in pairs:
        for row, expected in itertools.zip_longest(known_of(one), known_of(two)):
            assert row == expected
    for name in (
        *("mode", "operators", "results", "batch_size", "batch", "guards", "variables", "planned_sizes"),
        *("variable_symbols", "data_dependent_sizes", "findings", "first_collective", "squeezed_at", "logs"),
        *("output_spec", "paths", "axes", "training"),
    ):
        assert getattr(graph, name) == getattr(other, name), name
    assert [*graph.constants] == [*other.constants]


META = ("role", "operator", "phase", "constant", "random_seed", "updated", "has_data_dependent_size")


def known_of(graph: fx.Graph | None) -> Iterator[Any]:
    """Everything that is known of each node."""
    if graph is None:
        return
    graph.lint()
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


def blocks(count: int, kind: Callable[..., nn.Module] = Block, **options: Any) -> list[nn.Module]:
    return [kind(**options) for _ in range(count)]


def alternating() -> nn.Module:
    return Stack(*(block for _ in range(6) for block in (Block(), nn.Sequential(Block(), nn.Tanh()))))


def partly_frozen() -> nn.Module:
    """A run without gradients, and one with them."""
    model = Stack(*blocks(14))
    for block in (model.embed, *model.blocks[:7]):
        block.requires_grad_(False)
    return model


def tied() -> nn.Module:
    """The first weight is the last one, so that its gradient is added up behind the run."""
    model = Stack(*blocks(7))
    model.head.weight = model.embed.weight
    return model


def one_for_all() -> nn.Module:
    """One block is called seven times, so that its gradient is added up from call to call."""
    return Stack(*[Block()] * 7)


def sharing() -> nn.Module:
    model = Stack(*blocks(7))
    first: Any
    first, _, _, other, *_ = model.blocks
    other.linear.weight = first.linear.weight
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "equal blocks": (lambda: Stack(*blocks(7)), [7]),
    "batch norms": (lambda: Stack(*blocks(7, norm=nn.BatchNorm1d)), [7]),
    "begun caches": (lambda: Stack(*blocks(7, Caching)), [7]),
    "written values": (lambda: Stack(*blocks(7, Writing)), [7]),
    "a value with a gradient for all": (lambda: Biased(*blocks(8)), [8]),
    "an encoder and a decoder": (lambda: Crossing(blocks(6), blocks(9)), [6, 9]),
    "two kinds in turn": (alternating, [6]),
    "partly frozen": (partly_frozen, [7, 7]),
    "tied around the run": (tied, [7]),
    "one block for all": (one_for_all, [7]),
    "another block in front": (lambda: Stack(Block(0.5), *blocks(7)), [7]),
    "too few": (lambda: Stack(*blocks(5)), []),
    "another probability in the middle": (lambda: Stack(*blocks(3), Block(0.2), *blocks(3)), []),
    "outputs that are read behind the run": (lambda: Collected(*blocks(7)), []),
    "a frozen block": (lambda: Stack(*blocks(3), Block().requires_grad_(False), *blocks(3)), []),
    "two blocks that share a weight": (sharing, []),
}
"""Models, and the lengths of their runs of equal blocks."""
QUICK = ("batch norms", "begun caches", "an encoder and a decoder")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("equal blocks", mode) for mode in (Mode.LOSS, Mode.FORWARD)),
        *((name, Mode.TRAIN) for name in QUICK),
        *(slow(name, Mode.TRAIN) for name in MODELS if name not in QUICK),
    ],
)
def test_copies_of_a_block_are_what_torch_makes_of_the_others(
    name: str, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, lengths = MODELS[name]
    assembled, whole, runs = captured_both_ways(monkeypatch, lambda: capture_stack(make(), mode))
    assert [len(run.blocks) for run in runs] == lengths
    assert_same_graph(assembled, whole)


def gelu(graph: TrainingGraph, run: RepeatedBlocks, block: int) -> fx.Node:
    """The node of this operator in the backward of a block."""
    return next(
        node
        for node in graph.nodes
        if node.meta["phase"] is Phase.BACKWARD
        and node.meta["operator"] in run.operators(block)
        and node.target is torch.ops.aten.gelu_backward.default
    )


def another_input(graph: TrainingGraph, run: RepeatedBlocks) -> None:
    node = gelu(graph, run, 2)
    node.args = (node.args[0], gelu(graph, run, 0).args[1])


def a_reader_behind_the_run(graph: TrainingGraph, run: RepeatedBlocks) -> None:
    last = next(node for node in reversed([*graph.nodes]) if node.meta["phase"] is Phase.FORWARD)
    last.args = (gelu(graph, run, 1).args[1], *last.args[1:])


def another_order_of_results(graph: TrainingGraph, run: RepeatedBlocks) -> None:
    output = graph.module.graph.output_node()
    values = [*output.args[0]]  # type: ignore[misc]
    one, other, *_ = (i for i, role in enumerate(graph.results) if "blocks.2." in str(role))
    values[one], values[other] = values[other], values[one]
    output.args = (tuple(values),)


CHANGES: dict[str, Callable[[TrainingGraph, RepeatedBlocks], None]] = {
    "operator": lambda graph, run: setattr(gelu(graph, run, 1), "target", torch.ops.aten.mul.Tensor),
    "constant": lambda graph, run: setattr(gelu(graph, run, 1), "kwargs", {"approximate": "tanh"}),
    "input": another_input,
    "reader": a_reader_behind_the_run,
    "order": another_order_of_results,
}


@pytest.fixture(scope="module")
def differentiated() -> tuple[TrainingGraph, list[RepeatedBlocks]]:
    """A graph without the middle of its run."""
    found = list[tuple[TrainingGraph, list[RepeatedBlocks]]]()

    def kept(graph: TrainingGraph, runs: list[RepeatedBlocks]) -> TrainingGraph:
        found.append((graph, runs))
        return graph

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tracer, "instantiate_blocks", kept)
        capture_stack(Stack(*blocks(7)))
    return found[0]


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_in_the_backward_is_found(
    change: str, differentiated: tuple[TrainingGraph, list[RepeatedBlocks]]
) -> None:
    """Blocks that are equal in the model, and of which torch would make different backwards."""
    graph, runs = differentiated
    instantiate_blocks(copy_graph(graph), runs)
    changed = copy_graph(graph)
    CHANGES[change](changed, runs[0])
    with pytest.raises(IrregularBlocksError):
        instantiate_blocks(changed, runs)


@pytest.mark.slow
def test_where_blocks_turn_out_to_differ_all_are_differentiated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(graph: TrainingGraph, runs: list[RepeatedBlocks]) -> TrainingGraph:
        raise IrregularBlocksError("they differ")

    model = Stack(*blocks(6))
    expected = capture_stack(model)
    monkeypatch.setattr(tracer, "instantiate_blocks", refuse)
    with caplog.at_level(logging.INFO, "pipec"):
        found = capture_stack(model)
    assert "equal blocks are differentiated one by one: they differ" in caplog.text
    assert_same_graph(found, expected)


LAYERS = 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM", "GPTJForCausalLM"),
        *("OPTForCausalLM", "BertForMaskedLM", "AlbertForMaskedLM", "T5ForConditionalGeneration"),
        *("BartForConditionalGeneration", "ViTForImageClassification"),
    ],
)
def test_transformers_are_assembled_as_torch_differentiates_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zoo import huggingface, tiny_transformers  # imports transformers

    for size in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"):
        monkeypatch.setitem(tiny_transformers.SIZES, size, LAYERS)
    monkeypatch.setitem(tiny_transformers.SIZES, "num_hidden_groups", 1)  # all layers of ALBERT are one
    monkeypatch.setattr(tiny_transformers, "LAYERS", LAYERS)
    case = next(huggingface.find(each) for each in huggingface.architectures() if each.endswith(f"/{name}"))
    model, inputs = case.make(), case.batch(4)
    assembled, whole, runs = captured_both_ways(
        monkeypatch,
        lambda: tracer.capture(tracer.CaptureRequest(model, None, Mode.TRAIN, ModelCall((), inputs, None))),
    )
    assert runs
    assert_same_graph(assembled, whole)
