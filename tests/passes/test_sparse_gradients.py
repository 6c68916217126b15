"""Gradients of large tables, of which the rows are made that a microbatch has looked up."""

import copy
import functools
from typing import Any

import pytest
import torch
from slow_params import slow
from torch import Tensor, nn
from unsplit_reference import unsplit_step

import pipec
from pipec.runtime.sparse_gradients import RowSparseGradient, embedding_row_gradient

ROWS, LENGTH, WIDTH, TOKENS = 8, 6, 4, 70_000
SGD = functools.partial(torch.optim.SGD, lr=0.5)


@pytest.mark.parametrize("padding", [-1, 0, 7, 49, 99])
@pytest.mark.parametrize("scale_grad_by_freq", [False, True])
@pytest.mark.parametrize("has_padding", [False, True])
def test_rows_have_the_bits_of_the_whole_gradient(
    padding: int, scale_grad_by_freq: bool, has_padding: bool
) -> None:
    torch.manual_seed(0)
    tokens, gradient, total = torch.randint(1, 50, (3, 40)), torch.randn(3, 40, 8), torch.randn(100, 8)
    if has_padding:
        tokens[1, :5] = max(padding, 0)
    whole = torch.ops.aten.embedding_dense_backward(gradient, tokens, 100, padding, scale_grad_by_freq)
    rows = embedding_row_gradient(gradient, tokens, 100, padding, scale_grad_by_freq)
    assert isinstance(rows, RowSparseGradient)
    assert len(rows.numbers) <= 50
    expected = total + whole / 4
    rows.add_to(total, 0.25)
    assert torch.equal(total, expected)


def test_a_compiled_function_makes_the_whole_gradient() -> None:
    tokens, gradient = torch.tensor([3, 3, 5]), torch.randn(3, 2)
    make = torch.compile(
        lambda: embedding_row_gradient(gradient, tokens, 50, -1, False), fullgraph=True, backend="eager"
    )
    assert torch.equal(make(), torch.ops.aten.embedding_dense_backward(gradient, tokens, 50, -1, False))


class Model(nn.Module):
    """Looks rows up in a large table, with padding, and in a small one. If tied, its end does so, too."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH, padding_idx=None if tied else 2)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.tied = tied

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(LENGTH))
        x = self.layers(x)
        if self.tied:
            x = x * self.tokens(tokens + 1)
        return x.square().mean(dim=(1, 2)).mean()


def batch(seed: int) -> Tensor:
    return torch.randint(9, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


ROUNDING = {"rtol": 1e-5, "atol": 1e-7}


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        ({}, False),
        slow({"schedule": "zb-h1"}, False),
        ({}, True),
        ({"devices": 4, "stages": 2, "optimizer": SGD}, False),
        ({"devices": 4, "stages": 2, "optimizer": SGD, "shard": "gradients"}, False),
    ],
    ids=["gradients", "zb-h1", "tied", "updates", "shards"],
)
def test_two_steps_have_the_sums_of_eager(options: dict[str, Any], tied: bool) -> None:
    """Of replicas and of a tied table in another order, so that they are rounded otherwise."""
    torch.manual_seed(0)
    model = Model(tied)
    eager = copy.deepcopy(model)
    pipe = pipec.compile(model, microbatches=4, **{"devices": 2, **options})
    optimizer = SGD(eager.parameters())
    for seed in range(2):
        pipe.step(batch(seed))
        unsplit_step(eager, {"tokens": batch(seed)}, [2] * 4)
        if "optimizer" in options:
            optimizer.step()
            optimizer.zero_grad()
    tolerance = ROUNDING if tied or "optimizer" in options else {"rtol": 0, "atol": 0}
    for (name, mine), theirs in zip(pipe.named_parameters(), eager.parameters(), strict=True):
        pair = (mine, theirs) if "optimizer" in options else (mine.grad, theirs.grad)
        torch.testing.assert_close(*pair, msg=name, **tolerance)
    code = "".join(map(pipe.source, range(2)))  # where the small table has its whole gradient
    assert code.count(" = embedding_row_gradient(") == 1 + tied
    assert code.count("embedding_dense_backward") == 1
