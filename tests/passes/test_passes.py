"""What each pass makes of the graph before it, on one model: a tied embedding, a causal mask, a skip."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import pipec
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.cost.symbolic_sizes import MICROBATCH
from pipec.errors import VerifyError
from pipec.graph import (
    Gradient,
    LoweringLevel,
    TrainingGraph,
    depends_on_inputs_only,
    is_forward,
    recv,
    send,
    stage_of,
)
from pipec.hardware.devices import DEVICES, LinkModel
from pipec.hardware.topology import equal_devices
from pipec.ir import Mode, Phase
from pipec.passes import Pass, run_passes
from pipec.passes.annotate_cost import AnnotateCost
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.insert_communication import InsertCommunication
from pipec.passes.mark_recompute import MarkRecompute
from pipec.passes.merge_slice_gradients import MergeSliceGradients
from pipec.passes.simplify import SCALAR_OVERLOADS, Simplify
from pipec.passes.split_backward import SplitBackward
from pipec.passes.untie_gradients import UntieGradients

aten = torch.ops.aten
TOKENS, WIDTH, VOCABULARY, ROWS = 6, 8, 11, 4

DEVICE = DEVICES["cpu"]
LINK = LinkModel(bytes_per_second=1e9, latency_seconds=1e-6)


class Tied(nn.Module):
    """The head is the embedding; every block reads a mask that depends on the input's padding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        keep = (ids != 0).unsqueeze(-1)
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * keep
        return x @ self.embed.weight.t()


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.fixture(scope="module")
def captured() -> TrainingGraph:
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    return capture(CaptureRequest(Tied(), loss, Mode.TRAIN, ModelCall((ids,), {}, ids)))


def through(graph: TrainingGraph, *passes: Pass) -> TrainingGraph:
    return run_passes(graph, passes)


@pytest.fixture(scope="module")
def costed(captured: TrainingGraph) -> TrainingGraph:
    return through(captured, Simplify(), AnnotateCost(DEVICE))


@pytest.fixture(scope="module")
def cut(costed: TrainingGraph) -> TrainingGraph:
    return through(costed, AssignStages(CutStages(equal_devices(3, LINK), ROWS)))


@pytest.fixture(scope="module")
def communicating(cut: TrainingGraph) -> TrainingGraph:
    return through(cut, UntieGradients(), InsertCommunication())


def count(graph: TrainingGraph, test: Callable[[fx.Node], bool]) -> int:
    return sum(map(test, graph.nodes))


def gradients(graph: TrainingGraph) -> list[str]:
    return [role.fqn for role in graph.results if isinstance(role, Gradient)]


class Idle(nn.Module):
    """Computes nothing in every way that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        visible = torch.arange(TOKENS)[:, None] >= torch.arange(TOKENS)[None].expand(-1, TOKENS)
        hidden = self.first(x).clone().view(-1, WIDTH).view(-1, TOKENS, WIDTH) * torch.tensor(2)
        hidden = hidden.transpose(1, 2).transpose(-1, -2)
        return self.last(visible.float() @ hidden).square().mean()


def test_simplify_removes_what_computes_nothing() -> None:
    before = capture(
        CaptureRequest(Idle(), None, Mode.TRAIN, ModelCall((torch.randn(ROWS, TOKENS, WIDTH),), {}, None))
    )
    after = through(before, Simplify())
    removed = {aten.clone.default, aten.transpose.int}
    assert count(before, lambda node: node.target in removed and is_forward(node)) == 3
    assert count(after, lambda node: node.target in removed and is_forward(node)) == 0
    assert count(after, lambda node: node.target is aten.arange.default) == 1
    assert count(before, lambda node: node.target in SCALAR_OVERLOADS) > 0
    assert count(after, lambda node: node.target in SCALAR_OVERLOADS) == 0
    powers = [node.args[1] for node in after.nodes if node.target is aten.pow.Tensor_Scalar]
    assert powers == [2], "not the first power in the gradient of the square"
    views = [node.args[1] for node in after.nodes if node.target is aten.view.default]
    assert not [sizes for sizes in views if -1 in sizes]

    def undone(node: fx.Node) -> bool:
        return node.target is aten.t.default is node.all_input_nodes[0].target

    assert count(before, undone) > 0
    assert count(after, undone) == 0


def test_annotate_cost_prices_every_node_in_the_microbatch_size(costed: TrainingGraph) -> None:
    products = [
        n for n in costed.nodes if n.target in (aten.mm.default, aten.addmm.default) and is_forward(n)
    ]
    flops = 2 * TOKENS * WIDTH * MICROBATCH
    assert [n.meta["cost"].flops for n in products] == [flops * WIDTH] * 3 + [flops * VOCABULARY]
    assert all(node.meta["cost"].seconds(ROWS) >= 0 for node in costed.nodes)


def test_cut_stages_gives_each_stage_consecutive_operators(cut: TrainingGraph) -> None:
    forward = [
        (node.meta["operator"], stage_of(node))
        for node in cut.nodes
        if is_forward(node) and "stage" in node.meta
    ]
    assert {stage for _, stage in forward} == {0, 1, 2}
    assert [stage for _, stage in sorted(forward)] == sorted(stage for _, stage in forward)
    assert cut.level is LoweringLevel.CUT


def test_untie_gradients_splits_the_sum_of_a_tied_parameter(cut: TrainingGraph) -> None:
    after = through(cut, UntieGradients())
    assert gradients(cut).count("embed.weight") == 1
    assert gradients(after).count("embed.weight") == 2
    stages = [stage_of(node) for role, node in after.outputs if getattr(role, "fqn", "") == "embed.weight"]
    assert sorted(stages) == [0, 2]
    assert [name for name in gradients(after) if name != "embed.weight"] == [
        name for name in gradients(cut) if name != "embed.weight"
    ]


def crossings(graph: TrainingGraph) -> int:
    """Edges between computed values of two stages."""
    return sum(
        "stage" in source.meta and source.op == "call_function" and stage_of(source) != stage_of(node)
        for node in graph.nodes
        if "stage" in node.meta and node.target is not recv
        for source in node.all_input_nodes
    )


def test_insert_communication_leaves_no_edge_between_stages(
    cut: TrainingGraph, communicating: TrainingGraph
) -> None:
    assert crossings(cut) > 0
    assert crossings(communicating) == 0
    sends = [node for node in communicating.nodes if node.target is send]
    assert all([user.target for user in node.users] == [recv] for node in sends)
    assert all(stage_of(n) < n.args[1] for n in sends if is_forward(n))
    assert all(stage_of(n) > n.args[1] for n in sends if not is_forward(n))
    messages = [(n.all_input_nodes[0], n.args[1]) for n in sends]
    assert len(set(messages)) == len(messages)


def test_a_mask_is_made_on_each_stage_that_reads_it(communicating: TrainingGraph) -> None:
    made = {
        stage_of(node)
        for node in communicating.nodes
        if node.target is aten.ne.Scalar and depends_on_inputs_only(node)
    }
    assert made == {0, 1, 2}


def test_mark_recompute_replays_what_the_stage_did_not_receive(communicating: TrainingGraph) -> None:
    after = through(communicating, MarkRecompute(None))
    forward = (node for node in after.nodes if is_forward(node) and not node.meta.get("constant"))
    for node in forward:
        assert (node.meta["recompute"] is Phase.RECOMPUTE) == (node.target not in (send, recv)), node


def test_mark_recompute_replays_the_values_of_these_names(communicating: TrainingGraph) -> None:
    names = [node.name for node in communicating.nodes if is_forward(node) and stage_of(node) == 1]
    after = through(communicating, MarkRecompute(frozenset(names[::2])))
    able = {node.name for node in communicating.nodes if node.target not in (send, recv)}
    assert {node.name for node in after.nodes if node.meta.get("recompute")} == able & {*names[::2]}


def test_split_backward_defers_what_only_weights_await(communicating: TrainingGraph) -> None:
    after = through(communicating, MarkRecompute(), SplitBackward())
    assert {node.meta["phase"] for node in communicating.nodes} == {Phase.FORWARD, Phase.BACKWARD}
    phases = {node.name: node.meta["phase"] for node in after.nodes}
    assert set(phases.values()) == {Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT}
    weights = [node for role, node in after.outputs if isinstance(role, Gradient)]
    assert {node.meta["phase"] for node in weights} == {Phase.BACKWARD_WEIGHT}
    assert all(
        phases[source.name] is not Phase.BACKWARD_WEIGHT
        for node in after.nodes
        if node.meta["phase"] is Phase.BACKWARD_INPUT
        for source in node.all_input_nodes
        if source.op == "call_function"
    )


class Forgetful:
    """A pass that loses the cause of a node."""

    def __repr__(self) -> str:
        return "Forgetful()"

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        next(iter(graph.nodes)).meta.pop("operator")
        return graph


def read_operators(graph: TrainingGraph) -> TrainingGraph:
    """A pass that fails if a node has no cause."""
    assert all(node.meta["operator"] >= 0 for node in graph.nodes)
    return graph


@pytest.mark.parametrize(
    "others", [(), (Simplify(),), (read_operators,)], ids=["last", "unnoticed", "noticed"]
)
def test_the_pass_at_fault_is_named(captured: TrainingGraph, others: tuple[Pass, ...]) -> None:
    with pytest.raises(VerifyError, match=r"after Forgetful\(\)"):
        through(captured, Simplify(), Forgetful(), *others)


def test_pipec_dump_writes_the_graph_after_every_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPEC_DUMP", str(tmp_path / "dump"))
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    pipec.compile(Tied(), devices=3, microbatches=2, loss_fn=loss).prepare(ids, target=ids)
    files = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert files[9:11] == ["09_make_row_sparse_gradients.txt", "10_insert_communication.txt"]
    before, after = ((tmp_path / "dump" / name).read_text() for name in files[9:11])
    assert after.startswith("# InsertCommunication(")
    assert re.search(r"# \d+ nodes: [1-9]\d* added, \d+ removed", after)
    assert "stage 1" in before
    assert "= recv(" in after
    assert "= recv(" not in before


class Unbound(nn.Module):
    """Attention whose queries, keys and values are slices of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, WIDTH)).permute(1, 0, 2)
        first = self.qkv(x)[0]
        return (torch.sigmoid(q) * k + v).square().mean() + first.mean()


def test_the_gradient_of_slices_is_put_together_at_once() -> None:
    """Of all slices of a dimension. That of one slice alone stays as it was."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    model = Unbound()
    graph = capture(CaptureRequest(model, None, Mode.TRAIN, ModelCall((x,), {}, None)))
    selects = [node for node in graph.nodes if node.target is aten.select_backward.default]
    assert len(selects) == 4
    joined = through(graph, MergeSliceGradients())
    (stack,) = (node for node in joined.nodes if node.target is aten.stack.default)
    (alone,) = (node for node in joined.nodes if node.target is aten.select_backward.default)
    joint = sorted((s for s in selects if s.name != alone.name), key=lambda select: select.args[3])
    assert [term.name for term in stack.args[0]] == [select.args[0].name for select in joint]
    pipe = pipec.compile(copy.deepcopy(model), devices=1, microbatches=1)
    pipe.step(x)
    model(x).backward()
    for found, wanted in zip(pipe.parameters(), model.parameters(), strict=True):
        assert torch.equal(found.grad, wanted.grad)
    assert "torch.stack(" in pipe.source(0)
    assert ".add_(" in pipe.source(0)


def test_a_sum_is_made_in_the_shape_that_its_reader_wants() -> None:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    graph = capture(CaptureRequest(Rotated(), None, Mode.TRAIN, ModelCall((x,), {}, None)))
    (before,), (after,) = (
        [node for node in each.nodes if node.target is aten.sum.dim_IntList]
        for each in (graph, through(graph, Simplify()))
    )
    assert (before.args[2:], [user.target for user in before.users]) == ((True,), [aten.view.default])
    assert (after.args[2:], [user.op for user in after.users]) == ((), ["output"])


class Rotated(nn.Module):
    """Rotary positions turn the halves of a vector; of three thirds, two overlap and one is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x * 3 + torch.cat([-x[:, WIDTH // 2 :], x[:, : WIDTH // 2]], 1) * x.sin()
        return (x[:, :4] * x[:, 3:7]).square().mean()


def test_the_gradient_of_halves_is_put_together_and_added_in_its_place() -> None:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    model = Rotated()
    joined = through(
        capture(CaptureRequest(model, None, Mode.TRAIN, ModelCall((x,), {}, None))),
        Simplify(),
        MergeSliceGradients(),
    )
    assert count(joined, lambda node: node.target is aten.cat.default and not is_forward(node)) == 1
    assert count(joined, lambda node: node.target is aten.slice_backward.default) == 2
    pipe = pipec.compile(copy.deepcopy(model), devices=1, microbatches=1)
    pipe.step(x)
    model(x).backward()
    for found, wanted in zip(pipe.parameters(), model.parameters(), strict=True):
        assert torch.equal(found.grad, wanted.grad)
