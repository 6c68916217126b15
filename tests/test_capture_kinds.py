"""Kinds of models that eager torch can train, and what each needs of capture."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from awkward import WIDTH, Between, batch
from torch import Tensor, fx, nn
from unsplit import Inputs, Outcome, assert_equal, unsplit_step

import pipec
from pipec.capture.classify import classify
from pipec.capture.operators import OPERATOR_ID
from pipec.errors import CaptureError, PlanError
from pipec.graph import LossGradient
from pipec.pipeline import Pipeline
from pipec.runtime.draws import draw

mse = nn.functional.mse_loss

Model = Callable[..., Tensor]


def trained(
    model: nn.Module, inputs: Inputs, microbatches: int, devices: int = 2, **fixed: Any
) -> tuple[Outcome, Outcome, Pipeline]:
    """What a step of the pipeline and of the unsplit model leave; ``fixed`` arguments are not split."""
    unsplit = copy.deepcopy(model)
    pipe = pipec.compile(model, devices=devices, loss_fn=mse, microbatches=microbatches)
    found = pipe.step(inputs["x"], target=inputs["target"], **fixed)
    sizes = [len(rows) for rows in inputs["x"].tensor_split(microbatches)]
    loss = unsplit_step(lambda x, target: mse(unsplit(x, **fixed), target), inputs, sizes)
    return Outcome.of(found, model), Outcome.of(loss, unsplit), pipe


# which arguments are split


class Edges(nn.Module):
    """A graph network: ``edges`` are pairs of nodes, the same in every row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        nodes = self.first(x)
        source, target = edges
        return self.last(nodes[:, source] * nodes[:, target])


@pytest.mark.parametrize("rows", [2, 1])
def test_an_argument_with_as_many_rows_as_a_microbatch_is_not_split(rows: int) -> None:
    """An edge list has two rows. So may a microbatch have, or its sample of one row traced as two."""
    edges = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]])
    x, target = torch.randn(3 * rows, 3, WIDTH), torch.randn(3 * rows, 4, WIDTH)
    found, expected, _ = trained(Edges(), {"x": x, "target": target}, 3, edges=edges)
    assert_equal(found, expected)


# where nodes belong


def test_a_backward_node_that_reads_nothing_belongs_to_its_reader() -> None:
    """Operator 0 would drag what reads it, here ``sum``, to the first stage."""
    graph = fx.Graph()
    tangent = graph.placeholder("tangent")
    tangent.meta["role"] = LossGradient()
    ones = graph.call_function(torch.ops.aten.ones.default, ([4],))
    wide = graph.call_function(torch.ops.aten.expand.default, (ones, [2, 4]))
    product = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, tangent))
    product.meta["custom"] = {OPERATOR_ID: 5}
    total = graph.call_function(torch.ops.aten.add.Tensor, (product, wide))
    graph.output((total,))
    for node in (ones, wide):
        node.meta["partitioner_tag"] = "is_backward"
    classify(graph)
    assert [node.meta["operator"] for node in (ones, wide, product, total)] == [5, 5, 5, 5]


# random numbers


def test_a_draw_may_name_the_default_generator() -> None:
    """``torch.randn(shape, generator=None)`` is an overload of its own, whose ``generator`` must be given."""
    seeded = [torch.Generator().manual_seed(1) for _ in range(2)]
    found = draw(seeded[0], torch.ops.aten.randn.generator, [3], generator=None)
    assert torch.equal(found, torch.randn(3, generator=seeded[1]))


def test_a_generator_of_the_models_own_is_refused() -> None:
    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(x.shape, generator=self.source)

    with pytest.raises(CaptureError, match=r"generator=self\.source\)(.|\n)*Leave the generator out"):
        trained(Between(Seeded), batch(), 2)


# gradients that are sparse


class Words(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH, sparse=True)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.words(x)))


def words() -> Inputs:
    return {"x": torch.randint(20, (4, 3)), "target": torch.randn(4, 3, 20)}


def test_a_sparse_gradient_stays_sparse() -> None:
    model, inputs = Words(), words()
    unsplit = copy.deepcopy(model)
    pipe = pipec.compile(model, devices=2, loss_fn=mse, microbatches=2)
    for _ in range(2):
        pipe.step(inputs["x"], target=inputs["target"])
        unsplit_step(lambda x, target: mse(unsplit(x), target), inputs, (2, 2))
    found, expected = model.words.weight.grad, unsplit.words.weight.grad
    assert found.is_sparse
    assert torch.equal(found._indices(), expected._indices())
    assert torch.equal(found._values(), expected._values())
    torch.optim.SparseAdam([model.words.weight]).step()


def test_a_sparse_gradient_and_a_dense_one_of_a_tied_weight_are_added() -> None:
    found, expected, _ = trained(Words(tied=True), words(), 1, devices=1)
    assert_equal(found, expected)


def test_a_sparse_gradient_of_two_stages_is_refused() -> None:
    with pytest.raises(PlanError, match=r"stages 0, 1 all use words\.weight, whose .*sparse=False"):
        trained(Words(tied=True), words(), 2)


# operators that call graphs


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def test_an_operator_that_calls_a_graph_is_refused_with_a_remedy() -> None:
    with pytest.raises(CaptureError, match=r"'cond', which no stage can run\n  at test_.*\n.*torch\.where"):
        trained(Between(Conditional), batch(), 2)
