"""What each pass makes of the graph before it, on one model: a tied embedding, a causal mask, a skip."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from awkward_modules import assert_same_bits
from forward_modules import model
from torch import Tensor, fx, nn

import pipec
from pipec.capture.model_call import ModelCall
from pipec.capture.tracer import CaptureRequest, capture
from pipec.errors import VerifyError
from pipec.graph import TrainingGraph, depends_on_inputs_only, is_forward, send, stage_of
from pipec.hardware.devices import DEVICES, LinkModel
from pipec.hardware.topology import equal_devices
from pipec.ir import Mode
from pipec.passes import Pass, run_passes
from pipec.passes.annotate_cost import AnnotateCost
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.insert_communication import InsertCommunication
from pipec.passes.merge_slice_gradients import MergeSliceGradients
from pipec.passes.simplify import SCALAR_OVERLOADS, Simplify
from pipec.passes.untie_gradients import UntieGradients

aten = torch.ops.aten
TOKENS, WIDTH, VOCABULARY, ROWS = 6, 8, 11, 4

LINK = LinkModel(bytes_per_second=1e9, latency_seconds=1e-6)


@model(
    embed=lambda: nn.Embedding(VOCABULARY, WIDTH),
    blocks=lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
)
def Tied(self: Any, ids: Tensor) -> Tensor:
    """The head is the embedding; every block reads a mask that depends on the input's padding alone."""
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
def cut(captured: TrainingGraph) -> TrainingGraph:
    passes = (Simplify(), AnnotateCost(DEVICES["cpu"]))
    return through(captured, *passes, AssignStages(CutStages(equal_devices(3, LINK), ROWS)))


@pytest.fixture(scope="module")
def communicating(cut: TrainingGraph) -> TrainingGraph:
    return through(cut, UntieGradients(), InsertCommunication())


def count(graph: TrainingGraph, test: Callable[[fx.Node], bool]) -> int:
    return sum(map(test, graph.nodes))


@model(first=lambda: nn.Linear(WIDTH, WIDTH), last=lambda: nn.Linear(WIDTH, WIDTH))
def Idle(self: Any, x: Tensor) -> Tensor:
    """Computes nothing in every way that models do."""
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


def test_values_are_sent_once_to_each_stage_that_reads_them(communicating: TrainingGraph) -> None:
    """A mask of the input is not sent: it is made on each stage."""
    sends = [(n.all_input_nodes[0], n.args[1]) for n in communicating.nodes if n.target is send]
    assert len(set(sends)) == len(sends)
    masks = [n for n in communicating.nodes if n.target is aten.ne.Scalar and depends_on_inputs_only(n)]
    assert {stage_of(node) for node in masks} == {0, 1, 2}


@dataclass(frozen=True)
class Forgetful:
    """A pass that loses the cause of a node."""

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


def trained(net: nn.Module) -> tuple[TrainingGraph, str]:
    """The captured graph of a model, and the code of its pipeline. A step has the bits of eager torch."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    graph = capture(CaptureRequest(net, None, Mode.TRAIN, ModelCall((x,), {}, None)))
    return graph, assert_same_bits(net, {"x": x}, [ROWS], None, devices=1).source(0)


@model(qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH))
def Unbound(self: Any, x: Tensor) -> Tensor:
    """Attention whose queries, keys and values are slices of one tensor."""
    q, k, v = self.qkv(x).unflatten(-1, (3, WIDTH)).permute(1, 0, 2)
    first = self.qkv(x)[0]
    return (torch.sigmoid(q) * k + v).square().mean() + first.mean()


def test_the_gradient_of_slices_is_put_together_at_once() -> None:
    """Of all slices of a dimension. That of one slice alone stays as it was."""
    graph, code = trained(Unbound())
    selects = [node for node in graph.nodes if node.target is aten.select_backward.default]
    assert len(selects) == 4
    joined = through(graph, MergeSliceGradients())
    (stack,) = (node for node in joined.nodes if node.target is aten.stack.default)
    (alone,) = (node for node in joined.nodes if node.target is aten.select_backward.default)
    joint = sorted((s for s in selects if s.name != alone.name), key=lambda select: select.args[3])
    assert [term.name for term in stack.args[0]] == [select.args[0].name for select in joint]
    assert "torch.stack(" in code
    assert ".add_(" in code


@model(first=lambda: nn.Linear(WIDTH, WIDTH))
def Rotated(self: Any, x: Tensor) -> Tensor:
    """Rotary positions turn the halves of a vector; of three thirds, two overlap and one is left out."""
    x = self.first(x)
    x = x * 3 + torch.cat([-x[:, WIDTH // 2 :], x[:, : WIDTH // 2]], 1) * x.sin()
    return (x[:, :4] * x[:, 3:7]).square().mean()


def test_the_gradient_of_halves_is_put_together_and_added_in_its_place() -> None:
    """A sum is made in the shape that its reader wants."""
    graph, _ = trained(Rotated())
    simple = through(graph, Simplify())
    (before,), (after,) = (
        [node for node in each.nodes if node.target is aten.sum.dim_IntList] for each in (graph, simple)
    )
    assert (before.args[2:], [user.target for user in before.users]) == ((True,), [aten.view.default])
    assert (after.args[2:], [user.op for user in after.users]) == ((), ["output"])
    joined = through(simple, MergeSliceGradients())
    assert count(joined, lambda node: node.target is aten.cat.default and not is_forward(node)) == 1
    assert count(joined, lambda node: node.target is aten.slice_backward.default) == 2
