"""Streams without a flush that fail: no rank hangs, and what was begun is completed wherever it can be."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pipedream import SGD, assert_same, batches, delayed, pipeline, restart
from test_pipedream_ranks import told
from torch import Tensor
from workers import run_script

import pipec
from pipec.errors import ExecutionError, InputError


class FailsOnce(torch.optim.SGD):
    """Raises at the sixth update of the layer that ``fails`` names."""

    def __init__(self, named: Any) -> None:
        super().__init__([p for _, p in named], lr=0.1, momentum=0.9)
        self.count = 0
        self.mine = any(name == "6.weight" and not p.is_meta for name, p in named)

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.mine and self.count == 6:
            raise ValueError("the learning rate is negative")
        return super().step(closure)


def test_an_optimizer_that_raises_stops_all_ranks() -> None:
    """The error names the update and how far stages are; a saved state goes on."""
    pipe = pipeline(3, FailsOnce)
    state = {name: x.clone() for name, x in pipe.state_dict().items()}
    losses: list[Tensor] = []
    with pytest.raises(ExecutionError, match=r"update: ValueError: the learning rate is negative") as caught:
        losses.extend(pipe.stream(batches(20)))
    assert 5 <= len(losses) <= 8
    assert "updates that the stages of this process have made" in caught.value.__notes__[0]
    pipe.load_state_dict(state)
    assert len(list(pipe.stream(batches(5)))) == 5


def test_what_the_iterator_raises_is_raised_when_all_batches_are_trained_on() -> None:
    def failing() -> Iterator[Any]:
        yield from batches(6)
        raise OSError("the disk is full")

    pipe = pipeline(4)
    reference = delayed(pipe, SGD)
    losses: list[Tensor] = []
    with pytest.raises(OSError, match="the disk is full"):
        losses.extend(pipe.stream(failing()))
    assert losses == [reference.step(batch) for batch in batches(6)]
    assert_same(pipe, reference)


def test_a_batch_that_does_not_fit_ends_a_stream_after_those_before() -> None:
    def given() -> Iterator[Any]:
        yield from batches(6)
        yield torch.zeros(8, 6), torch.zeros(3, dtype=torch.long)

    pipe = pipeline(3)
    reference = delayed(pipe, SGD)
    losses: list[Tensor] = []
    with pytest.raises(InputError, match="target has 3 rows but the batch has 8"):
        losses.extend(pipe.stream(given()))
    assert losses == [reference.step(batch) for batch in batches(6)]
    assert_same(pipe, reference)


def test_an_interrupt_completes_what_was_begun() -> None:
    """Ctrl-C while the script waits for a loss: every stage has made the same updates afterwards."""
    pipe = pipeline(3)
    begun, main = threading.Event(), threading.main_thread()

    def slow() -> Iterator[Any]:
        for number, batch in enumerate(batches(50)):
            if number == 10:
                begun.set()
                time.sleep(0.3)
            yield batch

    def interrupt() -> None:
        begun.wait()
        time.sleep(0.1)
        assert main.ident is not None
        signal.pthread_kill(main.ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    losses: list[Tensor] = []
    with pytest.raises(KeyboardInterrupt):
        losses.extend(pipe.stream(slow()))
    thread.join()
    reference = delayed(pipeline(3), SGD)
    found = parameters(pipe)
    for batch in batches(50):
        reference.step(batch)
        if all(map(torch.equal, found, reference.history[-1].values())):
            break
    assert len(losses) < len(reference.history) - 1 <= len(losses) + 3
    restart(reference)
    assert list(pipe.stream(batches(3))) == [reference.step(batch) for batch in batches(3)]


def parameters(pipe: pipec.Pipeline) -> list[Tensor]:
    return [each.detach().clone() for each in pipe.parameters()]


def test_an_error_in_the_loop_completes_what_was_begun() -> None:
    pipe = pipeline(4)
    reference = delayed(pipe, SGD)

    def train() -> None:
        for number, _ in enumerate(pipe.stream(batches(20))):
            if number == 2:
                raise RuntimeError("the script's own")

    with pytest.raises(RuntimeError, match="the script's own"):
        train()
    pipe.drain()
    for batch in batches(6):
        reference.step(batch)
    assert_same(pipe, reference)


def test_two_streams_do_not_mix() -> None:
    """The second one drains the first, whose losses come when it is asked."""
    pipe = pipeline(3)
    reference = delayed(pipe, SGD)
    first = pipe.stream(batches(3))
    losses = [next(first)]
    others = list(pipe.stream(batches(2)))
    expected = [reference.step(batch) for batch in batches(3)]
    restart(reference)
    assert others == [reference.step(batch) for batch in batches(2)]
    assert [*losses, *first] == expected


@pytest.mark.slow
def test_a_rank_that_fails_stops_the_others(tmp_path: Path) -> None:
    printed = told(
        tmp_path,
        """
        from test_pipedream_failures import FailsOnce
        pipe = pipeline(3, FailsOnce, timeout=20.0)
        try:
            for loss in pipe.stream(batches(20)):
                pass
        except pipec.errors.PipecError as error:
            print("the learning rate is negative" in str(error), error.__notes__[0].split(":")[0])
        """,
        3,
    )
    told_by_all = "True updates that the stages of this process have made since the pipeline was last empty"
    assert [each.splitlines() for each in printed] == [[told_by_all]] * 3


@pytest.mark.slow
def test_a_script_may_end_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    """No thread keeps the process, in one process and in several."""
    body = """
        pipe = pipeline(2, SGD, timeout=20.0)
        stream = pipe.stream(batches(50))
        print(next(stream) > 0)
        """
    assert told(tmp_path, body, 2) == ["tensor(True)\n"] * 2
    script = tmp_path / "script.py"
    assert run_script(script, [], 0, tmp_path) == "tensor(True)\n"
