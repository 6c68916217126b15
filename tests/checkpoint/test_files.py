"""The folder of a checkpoint: damaged, replaced, shared, killed while it is written. One is always whole."""

import functools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from killed_saves import killed_in_call
from resumable_training import Run, start
from slow_params import slow

import pipec
from pipec.checkpoint import shards


@pytest.fixture(scope="module")
def run() -> Run:
    """It has made a step, so that everything has a state."""
    made = start("1 stage")
    made.train(0, 1)
    return made


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> Path:
    run.save(tmp_path / "saved")
    return tmp_path / "saved"


def states(run: Run) -> list[torch.Tensor]:
    entries = run.pipe.optimizer.state_dict()["state"].values()
    return [
        each.clone()
        for each in (*run.pipe.state_dict().values(), *(x for entry in entries for x in entry.values()))
    ]


def damages(path: Path) -> Iterator[Callable[[], object]]:
    """Ways to damage a file, each of which is made on the intact one."""
    content, chosen = path.read_bytes(), random.Random(path.name)
    for _ in range(12):
        flipped = bytearray(content)
        flipped[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
        yield functools.partial(path.write_bytes, flipped)
    for length in (0, 1, len(content) // 2, len(content) - 1):
        yield functools.partial(path.write_bytes, content[:length])
    yield functools.partial(path.write_bytes, content + b"\0")
    yield path.unlink
    path.write_bytes(content)


@pytest.mark.slow
def test_every_damage_is_found_with_the_name_of_the_file(run: Run, saved: Path) -> None:
    before = states(run)
    files = sorted(saved.iterdir())
    assert len(files) == 5
    for path in files:
        for damage in damages(path):
            damage()
            with pytest.raises(pipec.CheckpointError) as caught:
                run.load(saved)
            assert path.name in str(caught.value)
    assert all(map(torch.equal, states(run), before))
    run.load(saved)


def test_no_checkpoint_and_a_foreign_folder(run: Run, tmp_path: Path) -> None:
    with pytest.raises(pipec.CheckpointError, match="does not exist"):
        run.load(tmp_path / "none")
    with pytest.raises(pipec.CheckpointError, match=r"has neither model\.safetensors"):
        run.load(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "file").write_text("precious")
    with pytest.raises(pipec.CheckpointError, match="is not a checkpoint of pipec"):
        run.save(tmp_path / "notes")
    assert (tmp_path / "notes" / "file").read_text() == "precious"
    with pytest.raises(pipec.CheckpointError, match=r"saving to .*: "):
        run.save(tmp_path / "notes" / "file" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_two_runs_do_not_write_to_one_folder(run: Run, saved: Path) -> None:
    other = start("1 stage")
    with pytest.raises(pipec.CheckpointError, match="this run has neither written nor loaded"):
        other.save(saved)
    other.load(saved)
    other.save(saved, extra="other")
    with pytest.raises(pipec.CheckpointError, match="another run writes to it"):
        run.save(saved)
    assert run.load(saved) == "other"
    run.save(saved)


def test_a_process_killed_anywhere_leaves_a_checkpoint(run: Run, saved: Path) -> None:
    """Before each call that opens, syncs, renames or removes, until a save is over before it comes to that.

    The n-th fills everything with n, so that a mixture of two would show. Every other one is asynchronous.
    """
    found = number = 1
    write_filled(run, saved, number)
    while killed_in_call(functools.partial(write_filled, run, saved, number), number):
        before, found = found, run.load(saved)
        assert found in (before, number)
        filled = torch.cat([each.flatten() for each in states(run) if each.is_floating_point()])
        assert (filled == found).all()
        number += 1
    assert number > 15
    assert run.load(saved) == number
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


@torch.no_grad()
def write_filled(run: Run, path: Path, number: int) -> None:
    for tensor in run.pipe.state_dict().values():
        tensor.fill_(number)
    for part in run.pipe.optimizer.parts():
        for tensor in part.entries.values():
            tensor.fill_(number)
    run.save(path, extra=number, asynchronous=number % 2 == 0)
    run.pipe.finish_saving()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written in the background until it is set."""
    event, write = threading.Event(), shards.write_file

    def wait(path: Path, data: bytes) -> str:
        assert threading.current_thread() is threading.main_thread() or event.wait(20)
        return write(path, data)

    monkeypatch.setattr(shards, "write_file", wait)
    return event


class TestAsynchronous:
    @pytest.mark.parametrize("layout", [slow("1 stage"), "2 replicas, shard=parameters"])
    def test_training_goes_on_and_what_is_written_is_of_before(
        self, layout: str, held: threading.Event, tmp_path: Path
    ) -> None:
        run = start(layout)
        run.train(0, 2)
        saving = run.pipe.save_checkpoint(
            tmp_path / "saved", **run.training_state, extra="then", asynchronous=True
        )
        losses = run.train(2, 5)
        assert not saving.done()
        assert not (tmp_path / "saved").exists()
        held.set()
        saving.result()
        again = start(layout, seed=7)
        assert again.load(tmp_path / "saved") == "then"
        assert again.train(2, 5) == losses

    def test_one_at_a_time(self, held: threading.Event, tmp_path: Path) -> None:
        run, first, second = start("1 stage"), tmp_path / "first", tmp_path / "second"
        run.save(first, asynchronous=True)
        threading.Timer(0.1, held.set).start()
        run.save(second, asynchronous=True)
        assert first.exists()
        run.pipe.finish_saving()
        assert second.exists()

    def test_what_went_wrong_is_raised_by_the_next_call(
        self, run: Run, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = {path.name: path.read_bytes() for path in saved.iterdir()}
        with monkeypatch.context() as patch:
            patch.setattr(shards, "write_file", full)
            for call in (run.save, run.load):
                saving = run.pipe.save_checkpoint(saved, **run.training_state, asynchronous=True)
                wait([saving])
                with pytest.raises(pipec.CheckpointError, match=r"saving to .* failed: its file: No space"):
                    call(saved)
            saving = run.pipe.save_checkpoint(saved, **run.training_state, asynchronous=True)
            with pytest.raises(pipec.CheckpointError, match="No space"):
                saving.result()
        assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
        assert [path.name for path in saved.parent.iterdir()] == ["saved"]
        assert threads_of_checkpoints() == []
        run.save(saved)


def full(path: Path, data: bytes) -> str:
    raise OSError(28, "No space left on device", "its file")


def threads_of_checkpoints() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "pipec checkpoint"]


class TestARun:
    @pytest.mark.parametrize("asynchronous", [slow(False), True])
    def test_keeps_the_last_and_goes_on_from_the_newest(self, tmp_path: Path, asynchronous: bool) -> None:
        how = {"every": 2, "keep": 2, "asynchronous": asynchronous}
        run, checkpoints = start("1 stage"), pipec.CheckpointManager(tmp_path, **how)
        assert checkpoints.resume(run.pipe, **run.training_state) is None
        losses = []
        for number in range(7):
            losses += run.train(number, number + 1)
            checkpoints.step(run.pipe, extra=number, **run.training_state)
        run.pipe.finish_saving()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]
        again, checkpoints = start("1 stage", seed=7), pipec.CheckpointManager(tmp_path, **how)
        with pytest.raises(pipec.CheckpointError, match="neither written nor found when it resumed"):
            checkpoints.save(again.pipe, **again.training_state)
        assert checkpoints.resume(again.pipe, **again.training_state) == 5
        assert again.pipe.num_steps == 6
        assert again.train(6, 7) == losses[6:]

    def test_finds_one_that_was_being_replaced(self, tmp_path: Path) -> None:
        run, checkpoints = start("1 stage"), pipec.CheckpointManager(tmp_path, every=1)
        run.train(0, 1)
        checkpoints.step(run.pipe, extra="here", **run.training_state)
        (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.previous")
        assert checkpoints.resume(run.pipe, **run.training_state) == "here"
