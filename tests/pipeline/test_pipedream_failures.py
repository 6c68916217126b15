"""Streams without a flush that fail: no rank hangs, and what was begun is completed wherever it can be."""

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_params import slow
from torch import Tensor, nn
from worker_processes import run_script

import pipec
from pipec.errors import ExecutionError, InputError
from tests.pipeline.test_pipedream import SGD, assert_same, batches, delayed, pipeline, restart
from tests.pipeline.test_pipedream_ranks import told


class FailsOnce(torch.optim.SGD):
    """Raises in the middle of the sixth update of the stage that has the layer 4."""

    def __init__(self, named: Any) -> None:
        super().__init__([p for _, p in named], lr=0.1, momentum=0.9)
        self.count = 0
        self.mine = any(name == "4.weight" and not p.is_meta for name, p in named)

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.mine and self.count == 6:
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(7.0)
            raise ValueError("the learning rate is negative")
        return super().step(closure)


@pytest.mark.parametrize("schedule", ["pipedream", slow("pipedream-vertical-sync"), slow("pipedream-2bw")])
def test_an_optimizer_that_raises_leaves_the_newest_version_that_all_stages_hold(schedule: str) -> None:
    """The bits of a stream of so many batches. Plain stashing holds no such version, and says so."""
    pipe, straight = (pipeline(3, optimizer, schedule, model=with_norms()) for optimizer in (FailsOnce, SGD))
    losses: list[Tensor] = []
    with pytest.raises(ExecutionError, match=r"update: ValueError: the learning rate is negative") as caught:
        losses.extend(pipe.stream(batches(20, 12)))
    assert 5 <= len(losses) <= 8
    (note,) = caught.value.__notes__
    if schedule == "pipedream":
        assert re.search(r"no version of the weights is held by all stages.*stage 2 holds \d+, in", note)
        return
    count = int(note.removeprefix("the parameters and buffers are those after ").split()[0])
    assert 3 <= count <= 6
    list(straight.stream(batches(count, 12)))
    for name, expected in straight.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], expected), name


def test_a_first_stage_that_is_late_still_holds_a_version_of_all_others() -> None:
    """It fails in its fifth update, when the last stage has nothing in flight any more."""
    last_is_done = threading.Event()

    class FailsLate(torch.optim.SGD):
        def __init__(self, named: Any) -> None:
            super().__init__([p for _, p in named], lr=0.1, momentum=0.9)
            self.count, self.names = 0, {name for name, p in named if not p.is_meta}

        def step(self, closure: Any = None) -> Any:
            self.count += 1
            if "0.weight" in self.names and self.count == 5:
                assert last_is_done.wait(60)
                raise ValueError("the learning rate is negative")
            super().step(closure)
            if "8.weight" in self.names and self.count == 7:
                last_is_done.set()

    schedule = "pipedream-vertical-sync"
    pipe, straight = (pipeline(3, each, schedule, model=with_norms()) for each in (FailsLate, SGD))
    with pytest.raises(ExecutionError, match="the learning rate is negative") as caught:
        list(pipe.stream(batches(20, 12)))
    assert caught.value.__notes__[0].startswith("the parameters and buffers are those after 4 mini-batches")
    list(straight.stream(batches(4, 12)))
    for name, expected in straight.state_dict().items():
        assert torch.equal(pipe.state_dict()[name], expected), name


def with_norms() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6))]
    return nn.Sequential(*layers, nn.Linear(6, 3))


def test_a_saved_state_goes_on_after_a_failure() -> None:
    pipe = pipeline(3, FailsOnce)
    state = {name: x.clone() for name, x in pipe.state_dict().items()}
    with pytest.raises(ExecutionError, match=r"the learning rate is negative"):
        list(pipe.stream(batches(20)))
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
    begun, sent, main = threading.Event(), threading.Event(), threading.main_thread()

    def slow() -> Iterator[Any]:
        for number, batch in enumerate(batches(50)):
            if number == 10:
                begun.set()
                sent.wait()
            yield batch

    def interrupt() -> None:
        begun.wait()
        assert main.ident is not None
        signal.pthread_kill(main.ident, signal.SIGINT)
        sent.set()

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
    assert pipe.num_steps == len(reference.history) - 1
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
def test_a_script_may_end_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    """No thread keeps the process, in one process and in several."""
    body = """
        pipe = pipeline(2, SGD, timeout=240.0)
        stream = pipe.stream(batches(50))
        print(next(stream) > 0)
        """
    assert told(tmp_path, body, 2) == ["tensor(True)\n"] * 2
    script = tmp_path / "script.py"
    assert run_script(script, [], 0, tmp_path) == "tensor(True)\n"
