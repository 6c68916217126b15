"""A batch of fewer rows than microbatches, such as an epoch's last: what streams, norms and mixed rows do."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipec
from pipec.errors import InputError

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def classifier() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(9, 6, generator=generator), torch.tensor([0, 1, 2, 0, 2, 1, 1, 0, 1])


@pytest.mark.slow
def test_an_epoch_of_a_stream_ends_with_a_short_batch() -> None:
    x, y = data()
    batches = [(x[:8], y[:8])] * 3 + [(x[:2], y[:2]), (x[:1], y[:1])] + [(x[:8], y[:8])] * 2
    streamed, stepped = (
        pipec.compile(
            classifier(),
            2,
            microbatches=4,
            loss_fn=nn.functional.cross_entropy,
            optimizer=SGD,
            schedule="pipedream-2bw",
        )
        for _ in range(2)
    )
    losses = [float(loss) for loss in streamed.stream(batches)]
    assert all(map(torch.isfinite, map(torch.tensor, losses)))
    assert len(losses) == len(batches)
    assert losses[0] == stepped.step(*batches[0][:1], target=batches[0][1]).item()


@pytest.mark.slow
def test_dependent_rows_are_refused_whatever_their_number() -> None:
    """Also one row: a saved artifact of it would run other batches."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers: Any = classifier()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layers[:2](x)
            return self.layers[2:](hidden - hidden.mean(0))

    x, y = data()
    pipe = pipec.compile(Centred(), 2, microbatches=4, loss_fn=nn.functional.cross_entropy)
    for rows in (1, 2, 8):
        with pytest.raises(InputError, match="rows depend on other rows"):
            pipe.step(x[:rows], target=y[:rows])


@pytest.mark.slow
def test_a_batch_norm_needs_two_values_per_channel() -> None:
    """As torch says of a batch of one row. Of images each row has many values."""
    x, y = data()
    rows = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    pipe = pipec.compile(rows, 2, microbatches=4, loss_fn=nn.functional.cross_entropy)
    pipe.step(x[:8], target=y[:8])
    for few in (1, 2, 4, 5):
        with pytest.raises(InputError, match=f"of {few} rows in 4 microbatches, some have one row"):
            pipe.step(x[:few], target=y[:few])
    pipe.eval()
    pipe.eval_step(x[:2], target=y[:2])
    pipe = pipec.compile(rows.train(), 2, microbatches=1, loss_fn=nn.functional.cross_entropy)
    pipe.step(x[:2], target=y[:2])
    with pytest.raises(InputError, match="of 1 rows in 1 microbatches, some have one row"):
        pipe.step(x[:1], target=y[:1])
    images = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 3))
    pipe = pipec.compile(images, 2, microbatches=4, loss_fn=nn.functional.cross_entropy)
    pipe.step(x[:2, None], target=y[:2])
