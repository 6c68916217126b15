"""Sizes that values alone tell, as of ``x[mask]``, and the checks of every microbatch."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from awkward_modules import Pair, assert_same_bits, train_as_eager
from forward_modules import model
from slow_params import slow
from torch import Tensor, nn

import pipec
from pipec.errors import CaptureError, ExecutionError, InputError

WIDTH, LENGTH = 8, 5


@model(layer=lambda: nn.Linear(WIDTH, WIDTH))
def Masked(self: Any, x: Tensor) -> Tensor:
    """Computes with those rows that a mask selects, and puts them back."""
    mask, out = x[..., 0] > 0, x.clone()
    out[mask] = self.layer(x[mask])
    return out


@model(
    router=lambda: nn.Linear(WIDTH, 3),
    experts=lambda: nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)]),
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


@model(layer=lambda: nn.Linear(WIDTH, WIDTH))
def Repeated(self: Any, x: Tensor) -> Tensor:
    """Repeats each row as often as values say, and adds the copies up."""
    count = (x[..., 0] > 0).sum(1)
    copies = self.layer(x[:, 0].repeat_interleave(count, 0))
    row = torch.arange(x.shape[0]).repeat_interleave(count)
    return x + torch.zeros_like(x[:, 0]).index_add(0, row, copies)[:, None]


@model(embedding=lambda: nn.Embedding(7, WIDTH))
def Distinct(self: Any, x: Tensor) -> Tensor:
    """Embeds each of the values that occur once."""
    values, where = torch.unique((3 * x[..., 0].tanh()).long() + 3, return_inverse=True)
    return x + self.embedding(values)[where]


def between(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *layers, nn.Linear(WIDTH, WIDTH))


def data(rows: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    x, target = torch.randn(2, rows, LENGTH, WIDTH, generator=random)
    return x, target


@pytest.mark.slow
def test_each_microbatch_has_its_own_sizes() -> None:
    """Against eager torch on the whole batch, of two sizes."""
    torch.manual_seed(0)
    net = between(Masked(), Experts(), Repeated(), Distinct(), Masked())
    options = {"microbatches": 4, "microbatch_weight": "rows", "schedule": "zb-h1"}
    pair = Pair(net, F.mse_loss, devices=4, **options)
    for rows in (8, 12):
        x, target = data(rows)
        pair.step(x, target=target, error=2e-5)
    pair.evaluate(x, target=target)


@model(layer=lambda: nn.Linear(WIDTH, WIDTH))
def Paired(self: Any, x: Tensor) -> Tensor:
    """Adds up pairs of the rows that a mask selects, of which there must be an even number."""
    chosen = x[x[..., 0] > 0]
    torch._check(chosen.shape[0] % 2 == 0)
    return x + self.layer(chosen).reshape(-1, 2, WIDTH).sum()


def test_what_tracing_took_for_granted_is_required_of_every_microbatch() -> None:
    torch.manual_seed(0)
    pipe = pipec.compile(between(Paired()), 2, loss_fn=F.mse_loss, microbatches=8, microbatch_weight="rows")
    x, target = data(8)
    with pytest.raises(ExecutionError, match="forward: InputError: expected ") as caught:
        pipe.step(x, target=target)
    assert re.search(r"test_data_dependent_sizes.py(.|\n)*chosen = x\[x\[..., 0\] > 0\]", str(caught.value))


@model(layer=lambda: nn.Linear(WIDTH, WIDTH))
def Chosen(self: Any, x: Tensor) -> Tensor:
    return self.layer(x)[x > 0]


def test_a_result_of_such_a_size_is_refused() -> None:
    with pytest.raises(CaptureError, match="returns a tensor whose size depends on values"):
        pipec.compile(Chosen(), 1)(data(8)[0])


# checks of every microbatch, and numbers that a graph for one size cannot tell apart


ROWS = 4


class Illustrated(nn.Module):
    """Texts: two words of each row are replaced by features of two pictures."""

    def __init__(self, unrolled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head, self.unrolled = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), unrolled

    def forward(self, x: Tensor, replaced: Tensor, pictures: Tensor) -> Tensor:
        if self.unrolled:  # the batch becomes a number
            pictures = pictures * torch.tensor([2.0 for _ in pictures])[:, None, None]
            torch._check_tensor_all(replaced.sum() * WIDTH == pictures.numel())
        mask = replaced[..., None].expand(x.shape)
        return self.head(self.words(x).masked_scatter(mask, pictures)).square().mean()


def inputs(replaced: list[list[int]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, pictures = (torch.randn(ROWS, n, WIDTH, generator=generator) for n in (3, 2))
    return {"x": x, "replaced": torch.tensor(replaced).bool(), "pictures": pictures}


TWO_EACH = [[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 0]]
UNEQUAL = [[1, 1, 1], [1, 1, 1], [1, 0, 0], [0, 0, 1]]
FEWER = [[1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 1, 1]]


@pytest.mark.parametrize("unrolled", [slow(False), True])
def test_rows_take_their_own_elements_or_the_step_fails(unrolled: bool) -> None:
    """Of rows that choose more or fewer elements than they bring along, the unsplit model gives to others."""
    pipe = train_as_eager(
        Illustrated(unrolled), **inputs(TWO_EACH), options={"batched": {"pictures": 0, "replaced": 0}}
    )
    said = "each is checked as if it were" if unrolled else "the rows of each microbatch must bring along"
    pattern = rf"test_data_dependent_sizes\.py:(.|\n)*{said}"
    if torch.__version__.startswith("2.11"):  # which has no such check where the batch is a number
        pattern += "|the rows of each microbatch must bring along|off by inf"
    for replaced in (FEWER,) if not unrolled else (FEWER, UNEQUAL):
        errors = ExecutionError, InputError  # of the step, or of the check before it
        with pytest.raises(errors, match=pattern):
            pipe.step(**inputs(replaced))


@model()
def Counting(self: Any, x: Tensor) -> Tensor:
    rows = [row * 2 for row in x]  # the batch becomes a number
    return torch.stack(rows) if (x > 0).sum() > len(rows) else torch.stack(rows) + 1


def test_a_count_of_the_batch_is_not_compared_with_the_rows_of_a_microbatch() -> None:
    layers = (nn.Linear(WIDTH, WIDTH), Counting(), nn.Linear(WIDTH, WIDTH))
    net = nn.Sequential(Counting(), *layers)
    pipe = pipec.compile(net, 2, loss_fn=lambda y, target: y.mean(), microbatches=2)
    with pytest.raises(CaptureError, match=r"_sizes\.py:(.|\n)*the number 2, which may come from the 2"):
        pipe.step(torch.randn(ROWS, WIDTH), target=torch.zeros(ROWS))


@model(layers=lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))
def Overwriting(self: Any, x: Tensor) -> Tensor:
    """Shows a tensor, changes it, and reads what the first view shows, as Longformer does."""
    scores = x.new_zeros(x.shape[0], 4, 6)
    scores[:, :, 1:5] = self.layers[0](x)
    shown = scores.transpose(2, 1)
    other = self.layers[1](x).tanh()
    scores[:, :, :2] = other[:, :, :2]
    scores[:, :, 3:] += other[:, :, 1:]
    return self.layers[2]((shown + 1).transpose(2, 1)[:, :, 1:5]).square().mean()


@pytest.mark.slow
def test_a_tensor_that_changes_between_its_views_is_cut_where_data_flows() -> None:
    """torch makes views anew behind a change, and says they were of the operator that made the first one."""
    x = torch.randn(ROWS, 4, 4)
    assert_same_bits(Overwriting(), {"x": x}, [2, 2], None, devices=3)
