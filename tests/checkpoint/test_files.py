"""The folder of a checkpoint: converted, damaged, replaced, shared, killed while it is written.

One is always whole. It goes to torch.distributed.checkpoint and back; the command line tells what it has.
"""

import functools
import json
import os
import pickle
import random
import re
import threading
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch_checkpoint_script
from killed_saves import killed_in_call
from resumable_training import Net, Run, start
from slow_params import slow
from typer.testing import CliRunner
from worker_processes import run_ranks

import pipec
from pipec.checkpoint import shards
from pipec.cli import app

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:Detected an existing")


@pytest.fixture(scope="module")
def run() -> Run:
    """It has made a step, so that everything has a state."""
    made = start("1 stage")
    made.train(0, 1)
    return made


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> Path:
    run.save(tmp_path / "saved", extra={"seen": (1, 2)})
    return tmp_path / "saved"


def cli(command: str, *arguments: object, status: int = 0) -> str:
    words = ["checkpoint"] * (command == "convert")
    result = CliRunner().invoke(app, [*words, command, *map(str, arguments)])
    assert result.exit_code == status, (result.output, result.exception)
    return " ".join(result.output.split())


def test_what_is_in_a_checkpoint(run: Run, saved: Path, tmp_path: Path) -> None:
    facts = json.loads(cli("check", saved, "--json"))
    assert facts["num_steps"] == run.pipe.num_steps
    assert facts["weights"] == {"tensors": 10, "bytes": facts["weights"]["bytes"]}
    assert facts["schedulers"] == ["OneCycleLR"]
    assert [group["optimizer"] for group in facts["groups"]] == ["AdamW"] * 2
    assert f"{saved} is a valid checkpoint, after {facts['num_steps']} steps" in cli("check", saved)
    assert "is no artifact and no checkpoint" in cli("check", tmp_path, status=1)
    content = bytearray((saved / "checkpoint.pt").read_bytes())
    content[100] ^= 1
    (saved / "checkpoint.pt").write_bytes(content)
    for arguments in (("check", saved), ("convert", saved, tmp_path / "other")):
        assert "checkpoint.pt is not what was saved" in cli(*arguments, status=1)
    assert not (tmp_path / "other").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").touch()
    cli("convert", saved, tmp_path / "other", status=1)


def test_there_and_back_is_the_same_training(run: Run, saved: Path, tmp_path: Path) -> None:
    cli("convert", saved, tmp_path / "torch")
    cli("convert", tmp_path / "torch", tmp_path / "back")
    assert run.load(tmp_path / "back") == {"seen": (1, 2)}
    losses = run.train(1, 3)
    run.load(saved)
    assert run.train(1, 3) == losses
    assert (tmp_path / "back" / "checkpoint.pt").read_bytes() == (saved / "checkpoint.pt").read_bytes()


def test_of_a_foreign_folder_weights_and_the_state_of_a_named_optimizer_are_taken(
    run: Run, tmp_path: Path
) -> None:
    groups = [{"lr": 0.1, "params": ["head.weight"]}]
    state = {"model": Net(tied=False).double().state_dict(), "optim": {"param_groups": groups}}
    dcp.save({"app": state, "epoch": 3}, checkpoint_id=tmp_path / "torch", no_dist=True)
    folders = tmp_path / "torch", tmp_path / "made"
    assert "pass it, such as --optimizer AdamW" in cli("convert", *folders, status=2)
    assert "skipped: epoch" in cli("convert", *folders, "--optimizer", "AdamW")
    with pytest.raises(pipec.CheckpointError, match=r"head\.weight and words\.weight differ in the file"):
        run.pipe.load_checkpoint(tmp_path / "made", model_only=True)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize("where", ["metadata", "entry"])
def test_nothing_of_a_folder_is_run(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "torch"
    state = {"model": {"a": torch.ones(2)}, "optim": {"param_groups": [{"lr": 0.1, "params": ["a"]}]}}
    if where == "entry":
        state["optim"]["param_groups"][0]["lr"] = Evil()  # type: ignore[index]
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    if where == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert "mkdir" in cli("convert", folder, tmp_path / "made", "--optimizer", "SGD", status=1)
    assert [path.name for path in tmp_path.iterdir()] == ["torch"]


def test_a_file_outside_of_a_folder_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "torch" / ".metadata"
    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=path.parent, no_dist=True)
    found = pickle.loads(path.read_bytes())
    ((key, place),) = found.storage_data.items()
    found.storage_data = {key: replace(place, relative_path="../other")}
    path.write_bytes(pickle.dumps(found))
    assert "names a file outside its folder" in cli("convert", path.parent, tmp_path / "made", status=1)


def states(run: Run) -> list[torch.Tensor]:
    entries = run.pipe.optimizer.state_dict()["state"].values()
    return [
        each.clone()
        for each in (*run.pipe.state_dict().values(), *(x for entry in entries for x in entry.values()))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "missing"])
def test_every_damage_is_found_with_the_name_of_the_file(run: Run, saved: Path, damage: str) -> None:
    before, files = states(run), sorted(saved.iterdir())
    assert len(files) == 5
    for path in files:
        content = path.read_bytes()
        for at in random.Random(path.name).sample(range(len(content)), 4):
            flipped = content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
            kinds = {"flipped": flipped, "cut": content[:at], "longer": content + b"\0"}
            path.write_bytes(kinds.get(damage, b""))
            if damage == "missing":
                path.unlink()
            with pytest.raises(pipec.CheckpointError, match=re.escape(path.name)):
                run.load(saved)
        path.write_bytes(content)
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
        assert not [each for each in threading.enumerate() if each.name == "pipec checkpoint"]
        run.save(saved)


def full(path: Path, data: bytes) -> str:
    raise OSError(28, "No space left on device", "its file")


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


# trainings that go to FSDP2 and plain torch and back, over other numbers of ranks

SCRIPT = Path(torch_checkpoint_script.__file__)
PIPEC = {
    "one process": (0, {"devices": 2}),
    "2 stages": (2, {}),
    "2 x 2, shard=optimizer": (4, {"replicas": 2, "shard": "optimizer"}),
    "2 x 2, shard=gradients": (4, {"replicas": 2, "shard": "gradients"}),
    "2 x 2, shard=parameters": (4, {"replicas": 2, "shard": "parameters"}),
}


def ran(side: str, num_ranks: int, folder: Path, source: Path | str, **options: Any) -> dict[str, Any]:
    given = [json.dumps(options)] if side == "pipec" else []
    run_ranks(SCRIPT, num_ranks, folder.parent, [side, str(folder), str(source), *given])
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


def require_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same bits of weights and of AdamW's state, and the same hyperparameters."""
    for part in (lambda state: state["model"], lambda state: state["optim"]["state"]):
        torch.testing.assert_close(part(found), part(expected), rtol=0, atol=0)
    assert expected["optim"]["state"]
    assert found["optim"]["param_groups"] == expected["optim"]["param_groups"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", PIPEC)
def test_a_training_goes_to_torch_and_back(layout: str, tmp_path: Path) -> None:
    num_ranks, options = PIPEC[layout]
    first = ran("pipec", num_ranks, tmp_path / "pipec", "-", **options)
    require_same(first["again"], first["trained"])
    cli("convert", tmp_path / "pipec" / "pipec", tmp_path / "converted")
    for source in (tmp_path / "pipec" / "torch", tmp_path / "converted"):
        plain = ran("torch", 0, tmp_path / "plain", source)
        require_same(plain["loaded"], first["trained"])
    sharded = ran("torch", 3, tmp_path / "sharded", tmp_path / "pipec" / "torch")
    require_same(sharded["loaded"], first["trained"])
    for form in ("torch", "flat"):
        back = tmp_path / f"back from {form}"
        cli("convert", tmp_path / "sharded" / form, back, "--optimizer", "AdamW", "--num-steps", 4)
        again = ran("pipec", num_ranks, tmp_path / f"again from {form}", back, **options)
        require_same(again["loaded"], sharded["trained"])
