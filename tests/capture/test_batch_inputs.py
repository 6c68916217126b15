"""Which arguments are split into microbatches: what is certain needs no word, and what is not is asked."""

from typing import Any

import pytest
import torch
from awkward_modules import Pair, train_as_eager
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import pipec
from pipec.errors import InputError

ROWS, TOKENS, WIDTH = 4, 6, 5


class Model(nn.Module):
    """One linear layer of its first argument, and whatever a test does with the other."""

    def __init__(self, combine: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.combine = combine

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.combine(self.last(torch.tanh(self.first(x))), other).square().mean()


def check(combine: Any, x: Tensor, other: Any, **options: Any) -> pipec.Pipeline:
    return train_as_eager(Model(combine), x, other, options=options)


def add(y: Tensor, other: Tensor) -> Tensor:
    return y + other


def multiply_by_table(y: Tensor, table: Tensor) -> Tensor:
    return y @ table.t()


def mask_times(y: Tensor, mask: Tensor) -> Tensor:
    return torch.einsum("st,btw->bsw", mask, y)


def follow_edges(y: Tensor, edges: Tensor) -> Tensor:
    return y[:, edges[0]] - y[:, edges[1]]


TABLE = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


def test_a_tensor_that_the_model_needs_row_by_row_is_split() -> None:
    pipe = check(add, X, TABLE)
    assert "split into microbatches: args[0] f32[b, 5], args[1] f32[b, 5]" in str(pipe.plan)
    assert "whole in every microbatch" not in str(pipe.plan)


AMBIGUOUS = {
    "a table of as many rows": (multiply_by_table, X, TABLE),
    "a mask of time by time": (mask_times, torch.randn(ROWS, ROWS, WIDTH), torch.rand(ROWS, ROWS)),
    "a list of edges": (follow_edges, torch.randn(2, WIDTH), torch.randint(WIDTH, (2, 9))),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
@pytest.mark.parametrize("batched", [{}, {"other": None}, {1: None}])
def test_what_may_be_split_or_whole_is_tried_or_told(name: str, batched: dict[Any, None]) -> None:
    pipe = check(*AMBIGUOUS[name], batched=batched)
    assert not batched or "whole in every microbatch: args[1]" in str(pipe.plan)


@pytest.mark.parametrize("rows", [2, 1])
def test_edges_with_as_many_rows_as_a_microbatch_are_whole(rows: int) -> None:
    """Or as many as a sample of one row, which is traced as two."""
    check(follow_edges, torch.randn(3 * rows, WIDTH), torch.randint(WIDTH, (2, 9)), microbatches=3)


def test_a_table_in_front_of_weights_is_whole() -> None:
    """It is looked up by numbers of all rows, and a tail cannot have the layers behind it."""

    class Lookup(Model):
        def forward(self, x: Tensor, numbers: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
            return self.last(torch.tanh(self.first(x + table[numbers]))).square().mean()

    pipe = train_as_eager(Lookup(None), X, torch.tensor([3, 0, 1, 1]), TABLE)
    assert "whole in every microbatch: args[2]" in str(pipe.plan)


@torch.library.custom_op("pipec_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_without_a_check_what_is_not_proved_is_asked() -> None:
    check(add, X, TABLE, check="off")
    pipe = pipec.compile(Model(lambda y, other: y + doubled(other)), devices=2, microbatches=2, check="off")
    with pytest.raises(InputError, match=r"args\[1\].*batched=\{'other': 0\}.*batched=\{'other': None\}"):
        pipe.step(X, TABLE)


def test_a_tensor_stays_what_it_was() -> None:
    """A table has other rows than the batch in the first call, and as many in the second one."""
    table = torch.cat([TABLE, TABLE])
    pair = Pair(Model(multiply_by_table))
    pair.step(X, table)
    assert "whole in every microbatch: args[1] f32[8, 5]" in str(pair.pipe.plan)
    pair.step(torch.cat([X, X]), table)
    with pytest.raises(InputError, match=r"args\[1\] has 8 rows but the batch has 4, and it was split"):
        check(add, X, TABLE).step(X, table)


def test_parts_of_an_argument_are_named_by_a_structure() -> None:
    def combine(y: Tensor, other: dict[str, Tensor]) -> Tensor:
        return (y + other["rows"]) @ other["table"].t()

    check(combine, X, {"rows": TABLE, "table": TABLE.clone()}, batched={"other": {"table": None}})


@pytest.mark.parametrize(
    ("batched", "message"),
    [
        ({"otter": None}, "batched names 'otter', .*did you mean 'other'"),
        ({"other": 2}, r"batched has 2 for args\[1\], which has no dimension 2"),
        ({"other": 0.5}, r"batched has 0.5 for args\[1\]; expected the dimension"),
        ({"x": None, "other": None}, "no argument is a tensor"),
        ({"x": 0, "other": 0}, r"args\[0\] has 4 rows and args\[1\] has 8"),
        (None, r"kwargs\['other'\] has 8 rows and .*batched=\{'other': None\}"),
    ],
)
def test_a_batched_that_does_not_fit_or_is_missing_is_refused(batched: Any, message: str) -> None:
    pipe = pipec.compile(Model(multiply_by_table), devices=2, microbatches=2, batched=batched or {})
    table = torch.cat([TABLE, TABLE])
    with pytest.raises(InputError, match=message):
        pipe.step(X, table) if batched else pipe.step(x=X, other=table)


class Graph:
    """As the graphs of graph libraries: it is no tensor, and holds some."""

    def __init__(self) -> None:
        self.store = {"x": X, "edges": torch.randint(ROWS, (2, 9))}


RAGGED = torch.randn(3, WIDTH), torch.randn(2, WIDTH)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (pack_sequence([*RAGGED]), "a PackedSequence has its rows mixed"),
        (torch.nested.nested_tensor([*RAGGED]), "a nested tensor cannot"),
        (Graph(), r"args\[1\] is a .*Graph, which no stage can take"),
    ],
)
def test_what_has_a_batch_of_its_own_is_refused(argument: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pipec.compile(Model(add), devices=2, microbatches=2).step(X, argument)
