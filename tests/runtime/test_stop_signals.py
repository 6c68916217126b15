"""A signal that asks a script to end: all ranks follow it at the same step, and can still save."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from delayed_gradients import SGD, assert_same, batches, delayed, pipeline
from torch import Tensor

from pipec.runtime.processes import stop_signals
from pipec.runtime.processes.stop_signals import STOP_SIGNALS


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    STOP_SIGNALS.uninstall()


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


def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it comes at the same moment, as launchers and schedulers may both send it."""
    pipe = pipeline(2)
    pipe.before_stop(lambda: None)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    assert STOP_SIGNALS.pending == signal.SIGTERM
    monkeypatch.setattr(stop_signals, "FORCED_EXIT_SECONDS", 0.0)
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_forked_process_ends_as_any_other() -> None:
    """Such as a worker of a DataLoader, which its parent terminates."""
    pipeline(2).before_stop(lambda: None)
    forked, here = os.pipe()
    child = os.fork()
    if not child:
        os.write(here, b"!")
        signal.pause()
    os.read(forked, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not STOP_SIGNALS.pending


def test_a_handler_of_the_script_stays() -> None:
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    pipe = pipeline(2)
    pipe.before_stop(lambda: None)
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(list(pipe.stream(batches(2)))) == 2
    assert noted == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, before)


def test_signals_act_at_once_while_a_rank_compiles_and_are_noted_again_afterwards() -> None:
    """One that was noted before is not forgotten."""
    pipeline(2).before_stop(lambda: None)
    os.kill(os.getpid(), signal.SIGTERM)
    with STOP_SIGNALS.uninstalled():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert STOP_SIGNALS.pending == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
