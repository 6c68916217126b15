"""A signal that asks a script to end: all ranks follow it at the same step, and can still save."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_pipedream import SGD, assert_same, batches, delayed, pipeline
from torch import Tensor

from pipec.runtime.stops import STOPS


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    STOPS.ignore()


def test_sigterm_ends_a_stream_when_every_stage_has_made_the_same_updates() -> None:
    """In one process. What was begun has losses, which come before the end."""
    pipe = pipeline(3)
    reference = delayed(pipe, SGD)
    seen: list[Any] = []
    pipe.before_stop(lambda: seen.append((pipe.num_steps, [x.clone() for x in pipe.parameters()])))
    losses: list[Tensor] = []

    def train() -> None:
        for loss in pipe.stream(batches(20)):
            losses.append(loss)
            if len(losses) == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 143
    assert len(losses) < 10
    assert losses == [reference.step(batch) for batch in batches(len(losses))]
    assert_same(pipe, reference)
    ((num_steps, parameters),) = seen
    assert num_steps == len(losses)
    assert all(map(torch.equal, parameters, pipe.parameters()))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
