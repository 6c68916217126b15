"""Which arguments are split into microbatches: what is certain needs no word, and what is not is asked."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from unsplit_reference import relative_error

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
    """The loss and the gradients are those of the unsplit model. Returns the pipeline."""
    unsplit = Model(combine)
    trained = copy.deepcopy(unsplit)
    expected = unsplit(x, other)
    expected.backward()
    pipe = pipec.compile(trained, devices=2, microbatches=2, **options)
    assert relative_error(pipe.step(x, other), expected.detach()) < 1e-6
    for found, wanted in zip(trained.parameters(), unsplit.parameters(), strict=True):
        assert relative_error(found.grad, wanted.grad) < 1e-6  # type: ignore[arg-type]
    return pipe


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


def test_a_tensor_of_other_rows_is_whole() -> None:
    pipe = check(multiply_by_table, X, torch.cat([TABLE, TABLE]))
    assert "whole in every microbatch: args[1] f32[8, 5]" in str(pipe.plan)


AMBIGUOUS = {
    "a table of as many rows": (multiply_by_table, X, TABLE),
    "a mask of time by time": (mask_times, torch.randn(ROWS, ROWS, WIDTH), torch.rand(ROWS, ROWS)),
    "a list of edges": (follow_edges, torch.randn(2, WIDTH), torch.randint(WIDTH, (2, 9))),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_may_be_split_or_whole_is_tried(name: str) -> None:
    check(*AMBIGUOUS[name])


def test_a_table_in_front_of_weights_is_whole() -> None:
    """It is looked up by numbers of all rows, and a tail cannot have the layers behind it."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, numbers: Tensor, table: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x + table[numbers]))).square().mean()

    model, numbers = Lookup(), torch.tensor([3, 0, 1, 1])
    with torch.no_grad():
        expected = model(X, numbers, TABLE)
    pipe = pipec.compile(model, devices=2, microbatches=2)
    assert relative_error(pipe.step(X, numbers, TABLE), expected) < 1e-6
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


@pytest.mark.parametrize("name", AMBIGUOUS)
@pytest.mark.parametrize("argument", ["other", 1])
def test_what_the_user_says_is_whole_is_whole(name: str, argument: str | int) -> None:
    combine, x, other = AMBIGUOUS[name]
    pipe = check(combine, x, other, batched={argument: None})
    assert "whole in every microbatch: args[1]" in str(pipe.plan)


def test_a_tensor_stays_what_it_was() -> None:
    table = torch.cat([TABLE, TABLE])
    pipe = check(multiply_by_table, X, table)
    unsplit = Model(multiply_by_table)
    as_many_rows = torch.cat([X, X])
    assert relative_error(pipe.step(as_many_rows, table), unsplit(as_many_rows, table).detach()) < 1e-6
    pipe = check(add, X, TABLE)
    with pytest.raises(InputError, match=r"args\[1\] has 8 rows but the batch has 4, and it was split"):
        pipe.step(X, table)


def test_parts_of_an_argument_are_named_by_a_structure() -> None:
    def combine(y: Tensor, other: dict[str, Tensor]) -> Tensor:
        return (y + other["rows"]) @ other["table"].t()

    check(combine, X, {"rows": TABLE, "table": TABLE.clone()}, batched={"other": {"table": None}})


@pytest.mark.parametrize(
    ("batched", "message"),
    [
        ({"otter": None}, "batched names 'otter', which is no argument of the model; did you mean 'other'"),
        ({"other": 2}, r"batched has 2 for args\[1\], which has no dimension 2"),
        ({"other": 0.5}, r"batched has 0.5 for args\[1\]; expected the dimension that is the batch"),
        ({"x": None, "other": None}, "no argument is a tensor"),
        ({"x": 0, "other": 0}, r"args\[0\] has 4 rows and args\[1\] has 8"),
    ],
)
def test_a_batched_that_does_not_fit_is_refused(batched: Any, message: str) -> None:
    pipe = pipec.compile(Model(multiply_by_table), devices=2, microbatches=2, batched=batched)
    with pytest.raises(InputError, match=message):
        pipe.step(X, torch.cat([TABLE, TABLE]))


def test_keyword_arguments_without_a_common_batch_are_asked() -> None:
    pipe = pipec.compile(Model(multiply_by_table), devices=2, microbatches=2)
    with pytest.raises(InputError, match=r"kwargs\['other'\] has 8 rows and .*batched=\{'other': None\}"):
        pipe.step(x=X, other=torch.cat([TABLE, TABLE]))


class Graph:
    """As the graphs of graph libraries: it is no tensor, and holds some."""

    def __init__(self) -> None:
        self.store = {"x": X, "edges": torch.randint(ROWS, (2, 9))}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            pack_sequence([torch.randn(3, WIDTH), torch.randn(2, WIDTH)]),
            "a PackedSequence has its rows mixed",
        ),
        (
            torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(2, WIDTH)]),
            "a nested tensor cannot",
        ),
        (Graph(), r"args\[1\] is a .*Graph, which no stage can take"),
    ],
)
def test_what_has_a_batch_of_its_own_is_refused(argument: Any, message: str) -> None:
    pipe = pipec.compile(Model(add), devices=2, microbatches=2)
    with pytest.raises(InputError, match=message):
        pipe.step(X, argument)
