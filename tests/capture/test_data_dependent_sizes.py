"""Sizes that values alone tell, as of ``x[mask]``: they stay within a stage, and losses over them add up."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from awkward_modules import Pair, module, train_as_eager
from torch import Tensor, nn

import pipec
from pipec.errors import CaptureError, ExecutionError

WIDTH, LENGTH = 8, 5


@module(lambda: {"layer": nn.Linear(WIDTH, WIDTH)})
def Masked(self: Any, x: Tensor) -> Tensor:
    """Computes with those rows that a mask selects, and puts them back."""
    mask, out = x[..., 0] > 0, x.clone()
    out[mask] = self.layer(x[mask])
    return out


@module(
    lambda: {
        "router": nn.Linear(WIDTH, 3),
        "experts": nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)]),
    }
)
def Experts(self: Any, x: Tensor) -> Tensor:
    """Routes each row to two of three experts."""
    rows = x.reshape(-1, WIDTH)
    weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
    out = torch.zeros_like(rows)
    for number, expert in enumerate(self.experts):
        row, place = torch.where(chosen == number)
        out.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
    return out.view(x.shape)


@module(lambda: {"layer": nn.Linear(WIDTH, WIDTH)})
def Repeated(self: Any, x: Tensor) -> Tensor:
    """Repeats each row as often as values say, and adds the copies up."""
    count = (x[..., 0] > 0).sum(1)
    copies = self.layer(x[:, 0].repeat_interleave(count, 0))
    row = torch.arange(x.shape[0]).repeat_interleave(count)
    return x + torch.zeros_like(x[:, 0]).index_add(0, row, copies)[:, None]


@module(lambda: {"embedding": nn.Embedding(7, WIDTH)})
def Distinct(self: Any, x: Tensor) -> Tensor:
    """Embeds each of the values that occur once."""
    values, where = torch.unique((3 * x[..., 0].tanh()).long() + 3, return_inverse=True)
    return x + self.embedding(values)[where]


class Between(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.first(x).tanh()))


def data(rows: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    x, target = torch.randn(2, rows, LENGTH, WIDTH, generator=random)
    return x, target


@pytest.mark.slow
def test_each_microbatch_has_its_own_sizes() -> None:
    """Against eager torch on the whole batch, of two sizes."""
    torch.manual_seed(0)
    model = Between(Masked(), Experts(), Repeated(), Distinct(), Masked())
    options = {"microbatches": 4, "microbatch_weight": "rows", "schedule": "zb-h1"}
    pair = Pair(model, F.mse_loss, devices=4, **options)
    for rows in (8, 12):
        x, target = data(rows)
        pair.step(x, target=target, error=2e-5)
    pair.evaluate(x, target=target)


Loss = Callable[[Tensor, Tensor], Tensor]


def even(x: Tensor, y: Tensor) -> Tensor:
    chosen = x[y == 1]
    torch._check(chosen.shape[0] % 2 == 0)
    return chosen.reshape(-1, 2, WIDTH).sum(1).square().sum()


LOSSES: dict[str, Loss] = {
    "cross entropy": lambda x, y: F.cross_entropy(x[y != 0], y[y != 0]),
    "sum": lambda x, y: x[y != 0].square().sum(),
    "over a count": lambda x, y: x[y != 0].square().sum() / (y != 0).sum(),
    "pairs": even,
    "mixing what is computed": lambda x, y: x[x > 0].mean() + F.cross_entropy(x[y != 0], y[y != 0]),
    "mixing by the most": lambda x, y: x[y != 0].amax(0).sum(),
    "mixing by the size": lambda x, y: x[y != 0].sum() / x[y != 0].shape[0],
}
"""What mixes selected rows is computed of all rows."""


def labels() -> Tensor:
    """Microbatches of two rows have 2, 4, 2 and 6 ones, and the first row nothing else."""
    found = torch.zeros(8, LENGTH, dtype=torch.long)
    for row, count in zip((1, 2, 5, 7, 6), (2, 4, 2, 3, 3), strict=True):
        found[row, :count] = 1
    found[3:, 4] = 5
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_over_selected_rows_is_that_of_the_batch(name: str, said: list[str]) -> None:
    if "cross_entropy" in LOSSES[name].__code__.co_names and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11 does not know that two selections by one mask have one size")
    torch.manual_seed(0)
    options = {"microbatches": 4, "batched": {"target": 0}}
    pipe = train_as_eager(Between(), data(8)[0], target=labels(), loss_fn=LOSSES[name], options=options)
    assert any(stage.tail for stage in pipe.plan.stages) == name.startswith("mixing")
    assert "nothing proves" not in "".join(said)


@module(lambda: {"layer": nn.Linear(WIDTH, WIDTH)})
def Paired(self: Any, x: Tensor) -> Tensor:
    """Adds up pairs of the rows that a mask selects, of which there must be an even number."""
    chosen = x[x[..., 0] > 0]
    torch._check(chosen.shape[0] % 2 == 0)
    return x + self.layer(chosen).reshape(-1, 2, WIDTH).sum()


def test_what_tracing_took_for_granted_is_required_of_every_microbatch() -> None:
    torch.manual_seed(0)
    pipe = pipec.compile(Between(Paired()), 2, loss_fn=F.mse_loss, microbatches=8, microbatch_weight="rows")
    x, target = data(8)
    with pytest.raises(ExecutionError, match="forward: InputError: expected ") as caught:
        pipe.step(x, target=target)
    assert re.search(r"test_data_dependent_sizes.py(.|\n)*chosen = x\[x\[..., 0\] > 0\]", str(caught.value))


class Chosen(Between):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[x > 0]


def test_a_result_of_such_a_size_is_refused() -> None:
    with pytest.raises(CaptureError, match="returns a tensor whose size depends on values"):
        pipec.compile(Chosen(), 2)(data(8)[0])
