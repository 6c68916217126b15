"""Which arguments are split into microbatches, and along which dimension. Doubtful ones are asked about."""

import functools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from awkward_modules import Pair, train_as_eager
from batch_cases import doubled
from forward_modules import model
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from unsplit_reference import relative_error
from worker_processes import run_ranks

import pipec
from pipec.errors import InputError
from pipec.ir.batch_axis import BatchAxis

TIME, ROWS, WIDTH, WORDS = 7, 5, 8, 11
BY_TIME = {"x": 1, "target": "(t b)"}


class Recurrent(nn.Module):
    """Tokens of shape (time, batch), as recurrent layers of torch have them."""

    def __init__(self, kind: str = "LSTM", **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = getattr(nn, kind)(WIDTH, WIDTH, **options)
        self.head = nn.Linear(WIDTH * (1 + options.get("bidirectional", False)), WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x))[0])


ENCODER_LAYER = functools.partial(nn.TransformerEncoderLayer, WIDTH, 2, 12, dropout=0.0)


@model(
    embed=lambda: nn.Embedding(WORDS, WIDTH),
    places=lambda: nn.Parameter(torch.randn(16, 1, WIDTH)),
    layers=lambda: nn.TransformerEncoder(ENCODER_LAYER(), 1, enable_nested_tensor=False),
    head=lambda: nn.Linear(WIDTH, WORDS),
)
def Encoder(self: Any, x: Tensor) -> Tensor:
    """The language model of PyTorch's tutorial: ``(time, batch)``, and a mask of time by time."""
    mask = torch.full((x.shape[0], x.shape[0]), float("-inf"), dtype=torch.float64).triu(1)
    return self.head(self.layers(self.embed(x) + self.places[: x.shape[0]], mask))


def flat_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.reshape(-1, WORDS), target)


def made(kind: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(seed))


MODELS: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "LSTM": (Recurrent, {"microbatches": 1}),
    "LSTM of uneven rows": (Recurrent, {"microbatches": 3}),
    "LSTM of replicas": (Recurrent, {"microbatches": 3, "stages": 1}),
    "GRU, two directions": (functools.partial(Recurrent, "GRU", bidirectional=True), {}),
    "encoder": (Encoder, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_time_first_models_train_as_the_unsplit_one(name: str) -> None:
    """Five rows are split into two or three microbatches, which have different numbers.

    torch looks at the values of the encoder's mask to find out whether it is causal.
    """
    kind, options = MODELS[name]
    pair = Pair(made(kind), flat_loss, batched=BY_TIME, **options)
    for seed in (1, 3):
        pair.step(tokens(TIME, ROWS, seed=seed), target=tokens(TIME * ROWS, seed=2), outputs=True)
    assert name != "encoder" or "check_branch(" in pair.pipe.source(0) + pair.pipe.source(1)


def test_an_artifact_splits_by_the_same_dimensions(tmp_path: Path) -> None:
    pair = Pair(made(Recurrent), flat_loss, batched=BY_TIME)
    x, target = tokens(TIME, ROWS), tokens(TIME * ROWS, seed=2)
    loss = pair.pipe.step(x, target=target)
    pair.pipe.save(tmp_path / "saved", tensors=True)
    loaded = pipec.load(tmp_path / "saved")
    assert relative_error(loaded.step(x, target=target), loss) < 1e-12
    with pytest.raises(InputError, match=r"target is of shape \(34,\); expected 5 rows"):
        loaded.step(x, target=target[1:])


@model(first=lambda: nn.Linear(3, 4), last=lambda: nn.Linear(4, 4))
def Last(self: Any, x: Tensor, other: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a batch that is the last dimension, and the first, and in the middle."""
    hidden = self.last(torch.tanh(self.first(x.movedim(-1, 0)))) + other["rows"].view(-1, 2, 4)
    return {"last": hidden.movedim(0, -1), "first": hidden, "middle": hidden.transpose(0, 1)}


@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("word", [-1, 2, "t d b", "... b"])
def test_every_way_to_name_a_dimension(word: Any, rows: int) -> None:
    """Rows of another argument are merged with a dimension behind them, in a structure."""
    net = made(Last)
    pipe = pipec.compile(net, 2, microbatches=2, batched={"x": word, "other": {"rows": "(b t) ..."}})
    x, other = torch.randn(2, 3, rows).double(), {"rows": torch.randn(rows * 2, 4).double()}
    with torch.no_grad():
        expected = net(x, other)
    for name, found in pipe(x, other).items():
        assert relative_error(found, expected[name]) < 1e-12


@pytest.mark.slow
def test_another_length_of_sequences_becomes_a_variable() -> None:
    pair = Pair(made(Encoder), flat_loss, batched=BY_TIME)
    for time in (TIME, 4, 9, 6):
        pair.step(tokens(time, ROWS), target=tokens(time * ROWS, seed=2))
    assert [each.name for each in pair.pipe.plan.variables] == ["t", "t"]
    assert "args[0] i64[t, b] by dimension 1" in str(pair.pipe.plan)
    assert "target i64[t*b] by dimension 0" in str(pair.pipe.plan)


def test_weights_of_microbatches_are_told_by_what_the_user_passes() -> None:
    shapes = []

    def weight(x: Tensor, target: Tensor) -> Tensor:
        shapes.append((tuple(x.shape), tuple(target.shape)))
        return (target != 0).sum()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.reshape(-1, WORDS), target, ignore_index=0)

    pair = Pair(made(Recurrent), loss, batched=BY_TIME, microbatch_weight=weight)
    pair.step(tokens(TIME, ROWS), target=tokens(TIME * ROWS, seed=2))
    assert shapes == [((TIME, 3), (TIME * 3,)), ((TIME, 2), (TIME * 2,))]


REFUSED: Mapping[str, tuple[Any, str, *tuple[tuple[int, ...], ...]]] = {
    "no such argument": ({"otter": 1}, "batched names 'otter'"),
    "nothing is split": ({"x": None, "target": None}, "no argument is a tensor"),
    "no such dimension": ({"x": 2}, r"batched has 2 for args\[0\], which has no dimension 2"),
    "half a dimension": ({"x": 0.5}, r"batched has 0.5 for args\[0\]; expected the dimension"),
    "a flag": ({"x": True}, r"batched has True for args\[0\]; expected the dimension"),
    "other rows": ({"x": 1, "target": 1}, r"args\[0\] has 5 rows and target has 4", (7, 5), (7, 4)),
    "no multiple": (BY_TIME, "target has size 34 in dimension 0; expected a multiple", (7, 5), (34,)),
    "nothing tells the rows": ({"target": "(t b)"}, "and not how many rows the batch has"),
    "on both sides": ({"x": 1, "target": "(t b k)"}, "before b and behind it are both unknown"),
    "no batch": ({"x": 1, "target": "(t n)"}, "it names b 0 times"),
    "two batches": ({"x": "b b"}, "it names b 2 times"),
    "a name twice": ({"x": "t t b"}, "it names t twice"),
    "too many names": ({"x": "t b d"}, "the tensor has 2 dimensions"),
    "too few names": ({"x": "b"}, "the tensor has 2 dimensions"),
    "nested": ({"x": "((t) b)"}, "means nothing there"),
    "a number": ({"x": "t 5 b"}, "'5' means nothing there"),
    "undeclared, as long as wide": ({"x": 1}, "target has 5 rows in dimensions 0 and 1", (5, 5), (5, 5)),
    "an undeclared target": ({"x": 1}, r"target has 35 rows but the batch has 5.*'\(t b\)'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    batched, message, *shapes = REFUSED[name]
    x, target = shapes or ((TIME, ROWS), (TIME * ROWS,))
    pipe = pipec.compile(Recurrent(), 2, loss_fn=flat_loss, microbatches=2, batched=batched)
    with pytest.raises(InputError, match=message):
        pipe.step(tokens(*x), target=tokens(*target))


@model(layers=lambda: nn.GRU(4, 4), head=lambda: nn.Linear(4, 3))
def Flat(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns its rows behind the time, also merged, as a loss takes them."""
    hidden = self.head(self.layers(x)[0])
    return hidden.flatten(0, 1), hidden


@pytest.mark.parametrize(
    ("options", "sizes", "fixture"),
    [
        ({}, [(TIME, ROWS), (4, ROWS), (9, ROWS)], "said"),
        ({"microbatches": 3, "stages": 1}, [(TIME, ROWS)], "said"),
        ({}, [(TIME, 4)], "constant_batch"),
    ],
)
def test_outputs_have_their_rows_in_order(
    options: dict[str, Any], sizes: list[tuple[int, int]], fixture: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(fixture)
    net = made(Flat)
    pipe = pipec.compile(net, **{"devices": 2, "microbatches": 2, "batched": {"x": 1}, **options})
    for size in sizes:
        x = torch.randn(*size, 4, generator=torch.Generator().manual_seed(1)).double()
        for found, expected in zip(pipe(x), net(x), strict=True):
            assert relative_error(found, expected.detach()) < 1e-12


@pytest.mark.slow
@pytest.mark.usefixtures("constant_batch")
def test_outputs_are_refused_where_nothing_shows_their_rows() -> None:
    @model(inner=lambda: made(Flat))
    def Turned(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        flat, hidden = self.inner(x)
        return flat, hidden.transpose(0, 1)

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output[1], target)

    pipe = pipec.compile(made(Turned), 2, loss_fn=loss, microbatches=2, batched={"x": 1})
    x, target = torch.randn(TIME, 4, 4).double(), torch.randn(4, TIME, 3).double()
    with pytest.raises(InputError, match="is a constant in what"):
        pipe.step(x, target=target, outputs=True)
    assert relative_error(pipe.step(x, target=target), loss(made(Turned)(x), target).detach()) < 1e-12


@pytest.mark.parametrize("axis", [BatchAxis(d, o, i) for d in range(3) for o in (0, 1, 2) for i in (1, 3)])
def test_an_axis_and_its_inverse(axis: BatchAxis) -> None:
    """Rows go to the front as the definition says, and back to where they were."""
    rows, shape = 4, [2, 3, 5]
    shape[axis.dim] = rows * (axis.outer or 2) * axis.inner
    tensor = torch.arange(2 * 3 * 5 * 24).view(-1)[: torch.Size(shape).numel()].view(shape)
    front = axis.rows_first(tensor, rows)
    assert axis.fits(shape, rows)
    assert axis.rows(shape) == (rows if axis.outer else None)
    assert front._base is not None, "no copy"
    assert torch.equal(axis.restore(front), tensor)
    assert axis.restored_shape(front.shape) == tuple(shape)
    for index, part in enumerate(tensor.unbind(axis.dim)):
        assert {*part.flatten().tolist()} <= {*front[(index // axis.inner) % rows].flatten().tolist()}


SCRIPT = """
import os
import pipec
from tests.capture.test_batch_arguments import BY_TIME, ROWS, TIME, Recurrent, flat_loss, made, tokens
from unsplit_reference import relative_error
rank = int(os.environ["RANK"])
x, target = tokens(TIME, ROWS), tokens(TIME * ROWS, seed=2)
unsplit = made(Recurrent)
expected = flat_loss(unsplit(x), target)
expected.backward()
own = slice(0, 2) if rank == 0 else slice(2, ROWS)
mine = x[:, own], target.view(TIME, ROWS)[:, own].reshape(-1)
for batch, (given, wanted) in {"rank0": (x, target), "same": (x, target), "local": mine}.items():
    options = dict(stages=1) if batch == "local" else {}
    options |= dict(loss_fn=flat_loss, microbatches=2, batched=BY_TIME, batch=batch, timeout=240.0)
    pipe = pipec.compile(made(Recurrent), 2, **options)
    if batch == "rank0":
        loss = pipe.step(given, target=wanted) if rank == 0 else pipe.step()
    else:
        loss, output = pipe.step(given, target=wanted, outputs=True)
        assert relative_error(output, unsplit(given).detach()) < 1e-12
    assert relative_error(loss, expected.detach()) < 1e-12
    for name, parameter in pipe.named_parameters():
        if parameter.grad is not None:
            assert relative_error(parameter.grad, unsplit.get_parameter(name).grad) < 1e-12, name
            print("checked", name)
"""


@pytest.mark.slow
def test_ranks_are_sent_and_pass_rows_of_another_dimension(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for printed in run_ranks(script, 2, tmp_path):
        assert printed.count("checked") >= 9


# which arguments are split


class Combined(nn.Module):
    """One linear layer of its first argument, and whatever a test does with the other."""

    def __init__(self, combine: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.combine = combine

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.combine(self.last(torch.tanh(self.first(x))), other).square().mean()


def check(combine: Any, x: Tensor, other: Any, **options: Any) -> pipec.Pipeline:
    return train_as_eager(Combined(combine), x, other, options=options)


def multiply_by_table(y: Tensor, table: Tensor) -> Tensor:
    return y @ table.t()


def follow_edges(y: Tensor, edges: Tensor) -> Tensor:
    return y[:, edges[0]] - y[:, edges[1]]


TABLE = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
X = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))


def test_a_tensor_that_the_model_needs_row_by_row_is_split() -> None:
    pipe = check(torch.add, X, TABLE)
    assert "split into microbatches: args[0] f32[b, 5], args[1] f32[b, 5]" in str(pipe.plan)
    assert "whole in every microbatch" not in str(pipe.plan)


AMBIGUOUS = {
    "a table of as many rows": (multiply_by_table, X, TABLE),
    "a mask of time by time": (
        lambda y, mask: torch.einsum("st,btw->bsw", mask, y),
        torch.randn(4, 4, 5),
        torch.rand(4, 4),
    ),
    "a list of edges": (follow_edges, torch.randn(2, 5), torch.randint(5, (2, 9))),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
@pytest.mark.parametrize("batched", [{}, {"other": None}, {1: None}])
def test_what_may_be_split_or_whole_is_tried_or_told(name: str, batched: dict[Any, None]) -> None:
    pipe = check(*AMBIGUOUS[name], batched=batched)
    assert not batched or "whole in every microbatch: args[1]" in str(pipe.plan)


@pytest.mark.parametrize("rows", [2, 1])
def test_edges_with_as_many_rows_as_a_microbatch_are_whole(rows: int) -> None:
    """Or as many as a sample of one row, which is traced as two."""
    check(follow_edges, torch.randn(3 * rows, 5), torch.randint(5, (2, 9)), microbatches=3)


def test_a_table_in_front_of_weights_is_whole() -> None:
    """It is looked up by numbers of all rows, and a tail cannot have the layers behind it."""

    @model(first=lambda: nn.Linear(5, 5), last=lambda: nn.Linear(5, 5))
    def Lookup(self: Any, x: Tensor, numbers: Tensor, table: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x + table[numbers]))).square().mean()

    pipe = train_as_eager(Lookup(), X, torch.tensor([3, 0, 1, 1]), TABLE)
    assert "whole in every microbatch: args[2]" in str(pipe.plan)


def test_without_a_check_what_is_not_proved_is_asked() -> None:
    check(torch.add, X, TABLE, check="off")
    pipe = pipec.compile(
        Combined(lambda y, other: y + doubled(other)), devices=2, microbatches=2, check="off"
    )
    with pytest.raises(InputError, match=r"args\[1\].*batched=\{'other': 0\}.*batched=\{'other': None\}"):
        pipe.step(X, TABLE)


def test_keywords_of_which_none_is_certainly_the_batch_are_asked_about() -> None:
    pipe = pipec.compile(Combined(multiply_by_table), devices=2, microbatches=2)
    with pytest.raises(InputError, match=r"kwargs\['other'\] has 8 rows and .*batched=\{'other': None\}"):
        pipe.step(x=X, other=torch.cat([TABLE, TABLE]))


def test_a_tensor_stays_what_it_was() -> None:
    """A table has other rows than the batch in the first call, and as many in the second one."""
    table = torch.cat([TABLE, TABLE])
    pair = Pair(Combined(multiply_by_table))
    pair.step(X, table)
    assert "whole in every microbatch: args[1] f32[8, 5]" in str(pair.pipe.plan)
    pair.step(torch.cat([X, X]), table)
    with pytest.raises(InputError, match=r"args\[1\] has 8 rows but the batch has 4, and it was split"):
        check(torch.add, X, TABLE).step(X, table)


def test_parts_of_an_argument_are_named_by_a_structure() -> None:
    def combine(y: Tensor, other: dict[str, Tensor]) -> Tensor:
        return (y + other["rows"]) @ other["table"].t()

    check(combine, X, {"rows": TABLE, "table": TABLE.clone()}, batched={"other": {"table": None}})


RAGGED = torch.randn(3, 5), torch.randn(2, 5)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (pack_sequence([*RAGGED]), "a PackedSequence has its rows mixed"),
        (torch.nested.nested_tensor([*RAGGED]), "a nested tensor cannot"),
        (SimpleNamespace(x=X), r"args\[1\] is a .*SimpleNamespace, which no stage can take"),
    ],
)
def test_what_has_a_batch_of_its_own_is_refused(argument: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pipec.compile(Combined(torch.add), devices=2, microbatches=2).step(X, argument)
