"""A pipeline makes one call at a time: those of other threads are refused, and it goes on working."""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_reference import batches, model

import pipec
from pipec.errors import InputError

ADAMW = partial(torch.optim.AdamW, lr=0.01)


@pytest.fixture(scope="module")
def pipe() -> pipec.Pipeline:
    return pipec.compile(model(), 2, microbatches=2, optimizer=ADAMW)


@pytest.mark.slow
def test_a_pipeline_that_is_dropped_leaves_nothing_of_its_model() -> None:
    """Neither parameters nor their gradients: the next model may need all the memory of a GPU."""
    dropped = model()
    pipe = pipec.compile(dropped, 2, microbatches=2)
    pipe.step(**next(batches(1)))
    weight = next(dropped.parameters())
    assert weight.grad is not None
    alive = [weakref.ref(each) for each in (dropped, weight, weight.grad.untyped_storage())]
    del dropped, pipe, weight
    gc.collect()
    assert [each() for each in alive] == [None] * 3


def test_calls_of_other_threads_are_refused(pipe: pipec.Pipeline, tmp_path: Path) -> None:
    """While a step runs, which waits here for a batch of the stream that it is in."""
    (batch,) = batches(1)
    others: dict[str, Callable[[], Any]] = {
        "step": lambda: pipe.step(**batch),
        "forward": lambda: pipe(**batch),
        "eval_step": lambda: pipe.eval_step(**batch),
        "prepare": lambda: pipe.prepare(**batch),
        "stream": lambda: next(pipe.stream(batches(1))),
        "join": pipe.join,
        "drain": pipe.drain,
        "train": pipe.train,
        "save": lambda: pipe.save(tmp_path / "artifact"),
        "save_checkpoint": lambda: pipe.save_checkpoint(tmp_path / "checkpoint"),
        "load_checkpoint": lambda: pipe.load_checkpoint(tmp_path / "checkpoint"),
        "state_dict": pipe.state_dict,
        "full_state_dict": pipe.full_state_dict,
        "load_state_dict": lambda: pipe.load_state_dict({}),
        "gather_into": lambda: pipe.gather_into(model()),
        "_convert": pipe.double,
        "optimizer": pipe.optimizer.state_dict,
    }
    refused = dict[str, str]()

    def reading() -> Iterator[Any]:
        for name, call in others.items():
            try:
                call()
            except InputError as error:
                refused[name] = str(error)
        yield from batches(2)

    assert len(list(pipe.stream(reading()))) == 2
    assert refused.keys() == others.keys()
    assert refused["step"].startswith("step was called on thread 'pipec batches' while stream ran on another")
    assert list(pipe.stream(batches(2)))
    assert not list(tmp_path.iterdir())
