"""Models that are compiled for one number of rows: a run tells whether their numbers come from it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from awkward_modules import train_as_eager
from slow_params import slow, slow_but
from torch import Tensor, nn

import pipec
from pipec.errors import InputError, PipecError, UnequalStepError

WIDTH = 4
LOSS = nn.functional.mse_loss
torch.manual_seed(0)
X, Y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)

Reading = Callable[[Tensor, nn.Embedding], Tensor]


class Fixed(nn.Module):
    """Its loop makes a constant of the number of rows; four microbatches have two of them."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self.reading = reading
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.places = nn.Embedding(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.shape[0]):
            pass
        return self.last(self.reading(self.first(x), self.places))


def branch(h: Tensor, places: nn.Embedding) -> Tensor:
    """As Longformer asks whether any position has global attention."""
    mask = torch.arange(12)[None].expand(h.shape[0], -1) % 3 - 1
    return h + 1 if (mask > 0).flatten().any() else h


RIGHT: dict[str, Reading] = {
    "as many places as rows": lambda h, places: h + places(torch.arange(2)).sum(0),
    "a multiple of the rows": lambda h, places: h + places(torch.arange(0, 12)).mean(0),
    "a constant of their size": lambda h, places: h * torch.full((2, 2), 0.5).sum(),
    "a branch on places": branch,
}
WRONG: dict[str, Reading] = {
    "at least four": lambda h, places: h + places(torch.arange(max(h.shape[0], 4))).sum(0),
    "at most four": lambda h, places: h + places(torch.arange(min(h.shape[0], 4))).sum(0),
    "one more": lambda h, places: h + places(torch.arange(h.shape[0] + 1)).sum(0),
    "both": lambda h, places: h + torch.zeros(h.shape[0], 2).add(1).sum(),
    "ones of all rows": lambda h, places: h * torch.ones(h.shape[0]).sum(),
    "another computation": lambda h, places: h * 3 if h.shape[0] == 2 else h + 1 + h,
    "a number of each row": lambda h, places: h * torch.arange(h.shape[0])[:, None],
    "a place of each row": lambda h, places: h + places(torch.arange(h.shape[0])),
}


@pytest.mark.parametrize("name", RIGHT)
def test_numbers_of_the_batch_are_told_from_constants(name: str) -> None:
    train_as_eager(Fixed(RIGHT[name]), X, target=Y, loss_fn=LOSS, options={"microbatches": 4})


@pytest.mark.parametrize("name", slow_but(WRONG, "one more", "ones of all rows"))
def test_what_is_another_number_for_the_batch_is_refused(name: str) -> None:
    pipe = pipec.compile(Fixed(WRONG[name]), 2, loss_fn=LOSS, microbatches=4)
    with pytest.raises(PipecError, match=r"rows|microbatches"):
        pipe.step(X, target=Y)


@pytest.mark.slow
def test_outputs_follow_the_same_rule() -> None:
    with pytest.raises(PipecError, match="rows"):
        pipec.compile(Fixed(WRONG["one more"]), 2, microbatches=4)(X)


COUNTING = partial(nn.functional.cross_entropy, ignore_index=0)


@pytest.mark.parametrize(
    ("reading", "loss_fn", "target", "error", "message"),
    [
        (WRONG["ones of all rows"], LOSS, Y, UnequalStepError, "microbatches of 3 and 3 rows"),
        slow(lambda h, _: h, COUNTING, Y.argmax(1), InputError, "3 and 2 rows are compiled apart"),
    ],
)
def test_microbatches_of_several_sizes_have_graphs_of_their_own(
    reading: Reading, loss_fn: Any, target: Tensor, error: type[Exception], message: str
) -> None:
    """Of three, three and two rows, a run tells what the graph for three makes of six rows."""
    pipe = pipec.compile(Fixed(reading), 2, loss_fn=loss_fn, microbatches=3)
    with pytest.raises(error, match=message):
        pipe.step(X, target=target)
