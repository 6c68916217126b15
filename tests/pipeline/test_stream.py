"""Streams: the losses and parameters of a loop over steps, whatever batches are and however they end."""

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from optimizer_reference import batches, model
from slow_params import slow
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pipec
from pipec.errors import InputError


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))


def classifier(**options: Any) -> pipec.Pipeline:
    options = {"optimizer": partial(torch.optim.SGD, lr=0.1), **options}
    return pipec.compile(perceptron(), 2, microbatches=2, loss_fn=nn.functional.cross_entropy, **options)


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.randn(20, 6, generator=generator), torch.randint(0, 3, (20,), generator=generator)
    )


@pytest.mark.parametrize("shape", ["pair", "tuple of inputs", "named inputs", "dict"])
def test_a_batch_is_what_a_data_loader_yields(shape: str) -> None:
    streamed, stepped = classifier(), classifier()
    x, y = rows()[:8]
    batch = {
        "pair": [x, y],
        "tuple of inputs": ((x,), y),
        "named inputs": ({"input": x}, y),
        "dict": {"input": x, "target": y},
    }[shape]
    torch.manual_seed(1)
    (loss,) = streamed.stream([batch])
    torch.manual_seed(1)
    assert torch.equal(loss, stepped.step(x, target=y))


@pytest.mark.slow
def test_a_model_that_returns_its_loss_takes_positional_batches() -> None:
    tied = [pipec.compile(model(), 2, microbatches=2, optimizer=torch.optim.AdamW) for _ in range(3)]
    (batch,) = batches(1)
    (one,), (other,) = tied[0].stream([(batch["words"],)]), tied[1].stream([batch["words"]])
    assert one == other == tied[2].step(**batch)


def test_what_the_iterator_draws_is_drawn_as_in_a_loop() -> None:
    """A loader that shuffles, dropout, and a script that draws between steps share torch's generator."""

    def run(stream: bool) -> list[Tensor]:
        pipe, loader = classifier(), DataLoader(rows(), batch_size=4, shuffle=True)
        pipe.prepare(torch.zeros(4, 6), target=torch.zeros(4, dtype=torch.long))
        torch.manual_seed(3)
        if stream:
            return [loss + torch.rand(()) for loss in pipe.stream(loader)]
        found, iterator = [], iter(loader)
        batch = next(iterator, None)
        while batch is not None:  # the next batch is read while the step of this one works
            loss = pipe.step(batch[0], target=batch[1])
            batch = next(iterator, None)
            found.append(loss + torch.rand(()))
        return found

    assert run(stream=True) == run(stream=False)


@pytest.mark.slow
def test_a_dropped_pipeline_trains_until_its_stream_ends_and_is_freed_then() -> None:
    gc.collect()
    gc.disable()
    try:
        pipe = classifier(optimizer=None)
        x, y = rows()[:8]
        alive, losses = weakref.ref(pipe), pipe.stream([(x, y)] * 2)
        del pipe
        assert len(list(losses)) == 2
        assert alive() is not None
        del losses
        assert alive() is None
    finally:
        gc.enable()


def test_what_is_no_batch_is_refused() -> None:
    pipe = classifier()
    with pytest.raises(InputError, match="batches is 3; expected an iterable of batches"):
        pipe.stream(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a batch has 3 parts, but the pipeline has a loss_fn"):
        list(pipe.stream([(torch.zeros(4, 6), torch.zeros(4), torch.zeros(4))]))


def refilled(buffers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Twelve batches in so many pairs of tensors, which are used again."""
    pairs = [(torch.empty(8, 6), torch.empty(8, dtype=torch.int64)) for _ in range(buffers)]
    for number in range(12):
        rows, target = pairs[number % buffers]
        torch.manual_seed(number)
        yield rows.normal_(), target.random_(0, 3)


@pytest.mark.parametrize("schedule", [slow("1f1b"), "pipedream-2bw"])
def test_a_batch_that_is_in_use_is_not_refilled(schedule: str) -> None:
    """The stream reads ahead; tensors of a batch that is over may have the values of another one."""
    pipe = classifier(schedule=schedule)
    with pytest.raises(
        InputError, match=r"changed a tensor of batch 0, of shape \[8, 6\], to make batch 1: a stream reads"
    ):
        list(pipe.stream(refilled(1)))
    given, new = (classifier(schedule=schedule).eval() for _ in range(2))
    assert list(given.stream(refilled(6))) == list(new.stream(refilled(12)))
