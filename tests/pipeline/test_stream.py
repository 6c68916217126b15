"""Streams: the losses and parameters of a loop over steps, whatever batches are and however they end."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from equality_rows import Row, batch_of, piped
from optimizer_reference import batches, model
from slow_params import slow
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import pipec
from pipec.errors import InputError


def classifier(**options: Any) -> pipec.Pipeline:
    """A pipeline of two stages and a dropout, which updates."""
    return piped(Row(model="dropout", update="sgd"), **options).pipe


def rows(count: int) -> tuple[Tensor, Tensor]:
    return batch_of(Row(), 2, count)


@pytest.mark.parametrize("shape", ["pair", "tuple of inputs", "named inputs", "dict"])
def test_a_batch_is_what_a_data_loader_yields(shape: str) -> None:
    streamed, stepped = classifier(), classifier()
    x, y = rows(8)
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
        pipe, loader = classifier(), DataLoader(TensorDataset(*rows(20)), 4, shuffle=True)
        x, y = rows(4)
        pipe.prepare(x, target=y)
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
        x, y = rows(8)
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
        list(pipe.stream([(*rows(4), torch.zeros(4))]))


def refilled(buffers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Twelve batches in so many pairs of tensors, which are used again."""
    pairs = [rows(8) for _ in range(buffers)]
    for number in range(12):
        for tensor, value in zip(pairs[number % buffers], batch_of(Row(), number, 8), strict=True):
            tensor.copy_(value)
        yield pairs[number % buffers]


@pytest.mark.parametrize("schedule", [slow("1f1b"), "pipedream-2bw"])
def test_a_batch_that_is_in_use_is_not_refilled(schedule: str) -> None:
    """The stream reads ahead; tensors of a batch that is over may have the values of another one."""
    pipe = classifier(schedule=schedule)
    with pytest.raises(InputError, match=r"batch 0, of shape \[8, 3, 4\], to make batch 1: a stream reads"):
        list(pipe.stream(refilled(1)))
    given, new = (classifier(schedule=schedule).eval() for _ in range(2))
    assert list(given.stream(refilled(6))) == list(new.stream(refilled(12)))
