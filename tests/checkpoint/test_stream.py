"""Streams that stop between two mini-batches and go on: with the same batches, and the same bits."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from resumable_training import Run
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

import pipec
from pipec.runtime.processes.stop_signals import STOP_SIGNALS

ROWS, EPOCHS, STOPPED = 6, 3, (3, 6, 9, 10)
SCHEDULES = ("1f1b", "pipedream")


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Its items are drawn anew each time, by torch's generator."""

    def __init__(self, size: int = 5 * ROWS) -> None:
        self.size, self.read = size, list[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        return torch.randn(6) + index, torch.tensor(index % 3)


class Stateful:
    """A loader that knows where it is, as those of torchdata do."""

    def __init__(self, dataset: Noisy) -> None:
        self.dataset, self.at = dataset, 0
        self.order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(3))

    def __iter__(self) -> Iterator[list[Tensor]]:
        while self.at < len(self.order):
            rows = [self.dataset[int(index)] for index in self.order[self.at : self.at + ROWS]]
            self.at += ROWS
            yield [torch.stack(each) for each in zip(*rows, strict=True)]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]


class Eager:
    """It shuffles when the iteration begins, and not when the first batch is asked for."""

    def __init__(self, dataset: Noisy) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(self.dataset, ROWS, sampler=torch.randperm(len(self.dataset)).tolist()))


LOADERS: Mapping[str, Callable[[Noisy], Any]] = {
    "shuffled": lambda data: DataLoader(data, ROWS, shuffle=True),
    "by a generator of its own": lambda data: DataLoader(
        data, ROWS, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "shuffled at once": Eager,
    "stateful": Stateful,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Path]]:
    """By schedule a run, and a checkpoint from before its first step."""
    found = {}
    for schedule in SCHEDULES:
        torch.manual_seed(0)
        pipe = pipec.compile(
            nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3)),
            2,
            schedule=schedule,
            loss_fn=lambda output, target: (nn.functional.cross_entropy(output, target), {"n": output.sum()}),
            optimizer=partial(optim.SGD, lr=0.1, momentum=0.9),
            **({} if schedule == "pipedream" else {"microbatches": 2}),
        )
        run = Run(pipe, None, optim.lr_scheduler.StepLR(pipe.optimizer, 1, 0.9))
        found[schedule] = run, tmp_path_factory.mktemp("fresh") / schedule
        run.save(found[schedule][1])
    return found


@pytest.fixture
def runs(compiled: dict[str, tuple[Run, Path]]) -> Iterator[dict[str, Run]]:
    """By schedule a run before its first step."""
    for run, folder in compiled.values():
        run.load(folder)
    yield {schedule: run for schedule, (run, _) in compiled.items()}
    STOP_SIGNALS.uninstall()


def stream(run: Run, loader: Any, **resume: bool) -> Iterator[tuple[float, float, float]]:
    """The losses of a stream, with the logs and learning rates."""
    for loss in run.pipe.stream(loader, **resume):
        given = float(loss), float(run.pipe.logs["n"]), run.scheduler.get_last_lr()[0]
        run.scheduler.step()
        yield given


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stream_goes_on_with_the_same_bits(
    runs: dict[str, Run], schedule: str, kind: str, tmp_path: Path
) -> None:
    run = runs[schedule]

    def save(epoch: int) -> None:
        run.save(tmp_path / str(run.pipe.num_steps), extra=epoch)

    losses = trained(run, 0, LOADERS[kind](Noisy()), save)
    for stopped in STOPPED:
        torch.manual_seed(99)
        epoch = run.load(tmp_path / str(stopped))
        went_on = trained(run, epoch, LOADERS[kind](Noisy()), lambda _: run.pipe.drain())
        assert went_on == losses[stopped:]


def trained(run: Run, first: int, loader: Any, stop: Callable[[int], None]) -> list[Any]:
    """What the epochs from the ``first`` on give. Where a checkpoint is made, a pipeline is drained."""
    losses = []
    for epoch in range(first, EPOCHS):
        for loss in stream(run, loader, resume=True):
            losses.append(loss)
            if run.pipe.num_steps in STOPPED:
                stop(epoch)
    return losses


def test_what_was_trained_on_is_neither_read_again_nor_left_out(runs: dict[str, Run], tmp_path: Path) -> None:
    """By another schedule, and with a stop before the losses that were left have been given."""
    one, other, data = runs["pipedream"], runs["1f1b"], Noisy()
    losses, loader = stream(one, Stateful(data)), Stateful(data)
    next(losses)
    one.save(tmp_path / "saved")
    left = next(losses)
    data.read.clear()
    other.load(tmp_path / "saved")
    for mine, theirs in zip(one.pipe.parameters(), other.pipe.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    other.save(tmp_path / "again")
    other.load(tmp_path / "again")
    losses = stream(other, loader, resume=True)
    assert next(losses) == left
    assert data.read == []
    assert len(list(losses)) == 3
    assert data.read == loader.order[2 * ROWS :].tolist()


@pytest.mark.parametrize("how", ["break", "interrupt", "interrupt at once", "checkpoint"])
def test_what_was_trained_on_counts(runs: dict[str, Run], tmp_path: Path, how: str) -> None:
    """Without the losses that were left, and with them, another run goes on behind the same mini-batches."""
    run, data = runs["pipedream"], list(Stateful(Noisy()))

    def batches() -> Iterator[Any]:
        for number, batch in enumerate(data):
            if number == {"interrupt": 3, "interrupt at once": 1}.get(how):
                signal.raise_signal(signal.SIGINT)  # which the thread of the loop gets
                time.sleep(0.2)
            yield batch

    seen = 0
    with contextlib.suppress(KeyboardInterrupt):
        for _ in stream(run, batches()):
            seen += 1
            assert run.pipe.num_steps == seen
            if seen == 2 and how == "checkpoint":
                run.save(tmp_path / "saved")
            if seen == 2 and not how.startswith("interrupt"):
                break
    trained = run.pipe.num_steps
    if how != "checkpoint":
        run.save(tmp_path / "saved")
    run.load(tmp_path / "saved")
    assert run.pipe.num_steps == trained > seen
    parameters = [x.detach().clone() for x in run.pipe.parameters()]
    unseen = stream(run, data, resume=True)
    for number in range(seen, trained):
        next(unseen)
        assert run.pipe.num_steps == number + 1
        assert all(map(torch.equal, parameters, run.pipe.parameters()))
    assert len(list(unseen)) == 5 - trained
    run.load(tmp_path / "saved")
    assert len(list(stream(run, data[run.pipe.num_steps :], resume=False))) == 5 - trained
    assert run.pipe.num_steps == 5


def test_a_stream_says_whether_it_goes_on(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["1f1b"]

    def length(loader: Any, resume: bool) -> int:
        return len(list(stream(run, loader, resume=resume)))

    def reload_after_one(loader: Any) -> None:
        for _ in stream(run, loader):
            run.save(tmp_path / "one")
            break
        run.load(tmp_path / "one")

    reload_after_one(Stateful(Noisy()))
    for _ in range(2):
        with pytest.raises(pipec.InputError, match="pass resume=True to go on there"):
            run.pipe.stream([])
    assert length(Stateful(Noisy()), resume=False) == 5
    run.save(tmp_path / "over")
    run.load(tmp_path / "over")
    assert length(Stateful(Noisy()), resume=True) == 5
    reload_after_one(DataLoader(Noisy(), ROWS))
    assert length(Stateful(Noisy()), resume=True) == 4
    run.load(tmp_path / "one")
    with pytest.raises(pipec.InputError, match="after 1 batches of a stream, and now there are 0"):
        length([], resume=True)
    run.load(tmp_path / "one")
    assert length(DataLoader(Noisy(ROWS), ROWS), resume=True) == 0


def test_a_signal_between_two_streams_does_not_repeat_the_first(runs: dict[str, Run], tmp_path: Path) -> None:
    """The script's extra is of the last step of the first one; so is the place."""
    run, checkpoints = runs["1f1b"], pipec.CheckpointManager(tmp_path, every=100, asynchronous=True)
    for _ in stream(run, Stateful(Noisy())):
        checkpoints.step(run.pipe, **run.training_state, extra="first")
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        next(stream(run, Stateful(Noisy())))
    assert checkpoints.resume(run.pipe, **run.training_state) == "first"
    assert list(stream(run, Stateful(Noisy()), resume=True)) == []
    assert len(list(stream(run, Stateful(Noisy()), resume=True))) == 5


def test_a_signal_after_a_loop_was_left_saves_all_that_was_trained_on(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    run, seen, data = runs["pipedream"], 2, list(Stateful(Noisy()))
    checkpoints = pipec.CheckpointManager(tmp_path, every=100)
    for number, _ in enumerate(stream(run, data), start=1):
        checkpoints.step(run.pipe, **run.training_state, extra=number)
        if number == seen:
            break
    trained = run.pipe.num_steps
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        run.pipe.eval_step(data[0][0], target=data[0][1])
    assert checkpoints.resume(run.pipe, **run.training_state) == seen
    assert run.pipe.num_steps == trained > seen
    assert len(list(stream(run, data, resume=True))) == len(data) - seen
