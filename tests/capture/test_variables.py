"""Lengths and numbers that change from step to step: their code serves all, and each result is right."""

import copy
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from awkward_modules import Pair
from forward_modules import model
from slow_params import slow_but
from torch import Tensor, nn
from torch.nn import functional as F

import pipec

ROWS = 6


class Counted(Pair):
    """Counts what is compiled."""

    def __init__(self, model: nn.Module, loss_fn: Any = F.mse_loss, **options: Any) -> None:
        super().__init__(model, loss_fn, **options)
        self.num_compiled = 0
        compile_ = self.pipe._executions.compiler.compile

        def counted(*args: Any) -> Any:
            self.num_compiled += 1
            return compile_(*args)

        self.pipe._executions.compiler.compile = counted

    def num_compiled_by(self, *args: Any, **given: Any) -> int:
        """How often a step compiled, which is compared with that of the whole batch."""
        before = self.num_compiled
        self.step(*args, **{"error": 1e-5, **given})
        return self.num_compiled - before


class Attention(nn.Module):
    """Causal attention with a table of positions, a mask that is sliced, and a few numbers to vary."""

    def __init__(self, most: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Linear(4, 8), nn.Linear(8, 24), nn.Linear(8, 3)
        self.positions = nn.Parameter(torch.randn(most, 8) * 0.1)
        self.register_buffer("causal", torch.ones(most, most).tril().bool())
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, temperature: float = 1.0) -> Tensor:
        length = x.shape[1]
        hidden = self.embed(x) + self.positions[:length]
        query, key, value = self.qkv(self.dropout(hidden)).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / temperature
        allowed = self.causal[:length, :length] if mask is None else mask
        return self.out(hidden + scores.masked_fill(~allowed, -1e9).softmax(-1) @ value)


def sequences(length: int, rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    x, target = (torch.randn(rows, length, width, generator=generator) for width in (4, 3))
    return {"x": x, "target": target}


@pytest.mark.slow
def test_code_has_the_length_by_name_and_plans_for_the_one_it_was_captured_with() -> None:
    torch.manual_seed(0)
    pair = Pair(Attention(), F.mse_loss)
    for length in (8, 10):
        pair.step(**sequences(length), error=1e-5)
    plan, source = pair.pipe.plan, pair.pipe.source(0)
    assert 'b, t, x = frame["b"], frame["t"], frame["x"]' in source
    assert "f32[b, t, 8]" in source
    assert (plan.planned_sizes, plan.fixed_sizes) == ({"t": 10}, {})
    assert {(given.path, given.dim) for given in plan.variables} == {("kwargs['x']", 1), ("target", 1)}
    assert set(plan.guards) >= {"t >= 2", "t <= 16"}


@pytest.mark.slow
def test_dropout_draws_as_if_compiled_for_the_length() -> None:
    torch.manual_seed(0)
    model = Attention(dropout=0.5)
    pipes = [pipec.compile(copy.deepcopy(model), 2, loss_fn=F.mse_loss, microbatches=2) for _ in range(2)]
    for length in (6, 8):
        pipes[0].step(**sequences(length))
    pipes[0].zero_grad()
    for pipe in pipes:
        torch.manual_seed(7)
        pipe.step(**sequences(11))
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(*(x.parameters() for x in pipes), strict=True)
    )


@model(
    embed=lambda: nn.Linear(4, 8),
    out=lambda: nn.Linear(8, 3),
    positions=lambda: nn.Parameter(torch.randn(16, 8) * 0.1),
)
def Rounded(self: Any, x: Tensor) -> Tensor:
    """Sizes that are fractions of a length, rounded in all ways, and a slice of one table in two places."""
    length = x.shape[1]
    hidden = (self.embed(x) + self.positions[:length]).tanh() + self.positions[:length]
    halves = F.interpolate(hidden.transpose(1, 2), scale_factor=0.5).sum(-1, keepdim=True)
    parts = [hidden[:, : size(length * 0.3)].sum(1) for size in (round, math.ceil, math.floor)]
    return self.out(hidden + sum(parts).unsqueeze(1) + halves.transpose(1, 2))


@model(linear=lambda: nn.Linear(4, 3))
def Wide(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.linear(x) * [0, 1, 2, 3][y.shape[1]] + y.mean((1, 2))[:, None, None]


class Reader(nn.Module):
    """Token ids with a mask, a table of positions, and features of each row."""

    def __init__(self, features: int = 0) -> None:
        super().__init__()
        self.embed, self.features = nn.Embedding(32, 8), nn.Linear(features, 8) if features else None
        self.positions, self.out = nn.Parameter(torch.randn(32, 8) * 0.1), nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor | None = None, given: Tensor | None = None) -> Tensor:
        hidden = (self.embed(ids) + self.positions[: ids.shape[1]]).tanh()
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        if self.features is not None:
            hidden = hidden + self.features(given)[:, None]
        return self.out(hidden)


def of_tokens(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), labels)


def read(length: int, **others: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(length)
    ids, target = (torch.randint(most, (ROWS, length), generator=generator) for most in (32, 3))
    return {"ids": ids, "target": target, **others}


def reader(features: int = 0) -> Counted:
    torch.manual_seed(0)
    return Counted(Reader(features), of_tokens)


def symbolic(pair: Pair) -> set[str]:
    plan = pair.pipe.plan
    return {f"{x.path} {x.dim}" for x in plan.variables if x.name not in plan.fixed_sizes}


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_lengths_of_token_ids_are_symbols_from_the_first_call(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    pair = reader()
    found = [
        pair.num_compiled_by(**read(n, mask=(torch.rand(ROWS, n) < 0.7).to(dtype))) for n in (8, 10, 5, 32)
    ]
    assert (found, caplog.text) == ([1, 0, 0, 0], "")
    assert symbolic(pair) == {"kwargs['ids'] 1", "kwargs['mask'] 1", "target 1"}
    with pytest.raises(pipec.InputError, match="33"):
        pair.pipe.step(**read(33, mask=torch.ones(ROWS, 33).to(dtype)))


def test_lengths_of_token_ids_are_symbols_of_forwards_and_evaluations() -> None:
    pair = reader()
    for length in (8, 10, 5):
        ids, target = read(length).values()
        assert torch.equal(pair.pipe(ids), pair.unsplit(ids))
        pair.evaluate(ids, target=target)
    assert pair.num_compiled == 2


def test_a_length_that_equals_a_size_of_weights_is_a_symbol_as_soon_as_they_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = reader(features=4)
    found = [pair.num_compiled_by(**read(n, given=torch.randn(ROWS, 4))) for n in (4, 4, 6, 5)]
    assert (found, "is compiled on its own" in caplog.text) == ([1, 0, 1, 0], False)
    assert symbolic(pair) == {"kwargs['ids'] 1", "target 1"}


@model(first=lambda: nn.Linear(4, 8), second=lambda: nn.Linear(4, 8), out=lambda: nn.Linear(8, 3))
def Two(self: Any, x: Tensor, z: Tensor, scale: Tensor | None = None) -> Tensor:
    """Reads two sequences, of lengths that have nothing to do with each other."""
    hidden = self.first(x) if scale is None else self.first(x) * scale
    return self.out(hidden.tanh().sum(1) + self.second(z).tanh().mean(1))


def two(length: int, other: int, rows: int = ROWS) -> dict[str, Tensor]:
    x, z = sequences(length, rows)["x"], sequences(other + 100, rows)["x"][:, :other].contiguous()
    return {"x": x, "z": z, "target": torch.ones(rows, 3)}


@model(cell=lambda: nn.Linear(4, 4), out=lambda: nn.Linear(4, 3))
def Looping(self: Any, x: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for step in range(x.shape[1]):
        state = (self.cell(state) + x[:, step]).tanh()
        states.append(state)
    return self.out(torch.stack(states, 1))


@pytest.mark.slow
def test_a_length_that_cannot_be_a_symbol_is_compiled_for_each_value_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Counted(Looping())
    with caplog.at_level(logging.WARNING, "pipec"):
        found = [pair.num_compiled_by(**sequences(length)) for length in (2, 3, 4, 5, 3, 4)]
    assert found == [1, 1, 1, 1, 0, 0]
    (said,) = [record.message for record in caplog.records if "is compiled on its own" in record.message]
    assert "each value of kwargs['x'], target is compiled on its own" in said
    assert "test_variables.py" in said


class Scaled(nn.Module):
    """A number enters tensors, a formula of numbers, and if there is a ``limit``, a condition."""

    def __init__(self, limit: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.limit = nn.Linear(4, 8), nn.Linear(8, 3), limit

    def forward(self, x: Tensor, temperature: float, power: int = 3) -> Tensor:
        hidden = self.first(x) / temperature
        if self.limit and temperature > self.limit:
            hidden = hidden + 1
        counts = torch.arange(8) * temperature
        hidden = hidden.tanh() * (1 - temperature / 3) + counts + torch.full((8,), temperature) * 0.1
        return self.last(hidden + power * 0.01) * (temperature * 0.3)


@model(layers=lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
def Repeated(self: Any, x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = self.layers[1](self.layers[0](x))
    return self.layers[2](x)


def scaled(temperature: float, power: int = 3) -> dict[str, Any]:
    return {**sequences(4), "temperature": temperature, "power": power}


CALLS: dict[str, tuple[Callable[[], nn.Module], list[dict[str, Any]], list[int]]] = {
    "fractions of a length, rounded": (Rounded, [sequences(n) for n in (7, 9, 8, 10, 16)], [1, 1, 0, 0, 0]),
    "a length that must be a number, and another one": (
        Wide,
        [
            {**sequences(n), "y": torch.randn(ROWS, width, 4)}
            for n, width in ((8, 2), (9, 3), (5, 3), (6, 3), (7, 2), (4, 2))
        ],
        [1, 1, 0, 0, 1, 0],
    ),
    "lengths that were equal by chance": (
        Two,
        [two(*lengths) for lengths in ((4, 4), (7, 7), (8, 5), (9, 7), (5, 9), (9, 9), (3, 3))],
        [1, 1, 1, 0, 0, 0, 0],
    ),
    "a dimension of one element": (
        Two,
        [{**two(n, 3), "scale": torch.rand(ROWS, k, 8)} for n, k in ((4, 4), (5, 5), (6, 1), (7, 7))],
        [1, 1, 1, 0],
    ),
    "numbers, of which a whole 1 is no symbol": (
        Scaled,
        [
            {**scaled(*numbers), "error": 0.0}
            for numbers in ((1.0, 2), (0.7, 2), (1 / 3, 2), (1.9, 2), (0.9, 5), (1.0, 7), (0.9, 1))
        ],
        [1, 1, 0, 0, 1, 0, 1],
    ),
    "a condition on a number": (
        lambda: Scaled(limit=1.0),
        [scaled(t) for t in (0.5, 0.7, 0.9, 1.5, 2.5, 1.0, 0.1)],
        [1, 1, 0, 1, 0, 0, 0],
    ),
    "a number that decides what is computed": (
        Repeated,
        [{**sequences(n), "times": times} for n, times in ((4, 2), (4, 3), (4, 4), (5, 3), (6, 3))],
        [1, 1, 1, 1, 0],
    ),
}


@pytest.mark.parametrize("name", slow_but(CALLS, "a length that must be a number, and another one"))
def test_a_model_is_compiled_again_where_it_must_be(name: str) -> None:
    """A number is an input from its second value on, with the bits of one microbatch."""
    torch.manual_seed(0)
    make, calls, expected = CALLS[name]
    pair = Counted(make(), microbatches=1 if "error" in calls[0] else 2)
    assert [pair.num_compiled_by(**call) for call in calls] == expected


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Attention, Path]:
    folder = tmp_path_factory.mktemp("saved") / "artifact"
    torch.manual_seed(0)
    model = Attention()
    pipe = pipec.compile(model, devices=2, microbatches=2, loss_fn=F.mse_loss)
    for length, temperature in ((6, 1.0), (8, 0.7)):
        pipe.step(**sequences(length), temperature=temperature)
    pipe.save(folder, tensors=True)
    return model, folder


@pytest.mark.slow
def test_a_saved_pipeline_takes_the_lengths_that_it_was_compiled_for(saved: tuple[Attention, Path]) -> None:
    model, folder = saved
    loaded = pipec.load(folder)
    for length in (3, 15, 6):
        given = sequences(length)
        expected = F.mse_loss(model(given["x"], temperature=0.6), given["target"])
        torch.testing.assert_close(loaded.step(**given, temperature=0.6), expected.detach())


Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: sequences(17), "is right where t <= 16, but the arguments have t = 17: dimension 1"),
        (lambda given: sequences(1), "is right where t >= 2, but the arguments have t = 1:"),
        (lambda given: {**given, "target": sequences(9)["target"]}, "dimension 1 of target is 9, but t is 8"),
        (lambda given: {**given, "temperature": 2}, "temperature'] is 2; expected a number of type float"),
        (lambda given: {**given, "x": torch.zeros(6)}, r"kwargs\['x'\] has no dimension 1, which is t"),
    ],
)
def test_a_saved_pipeline_refuses_other_sizes(
    saved: tuple[Attention, Path], change: Change, message: str
) -> None:
    given = {**change(sequences(8))}
    with pytest.raises(pipec.InputError, match=message):
        pipec.load(saved[1]).step(**{"temperature": 0.5, **given})
