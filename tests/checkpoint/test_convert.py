"""Checkpoints to and from torch.distributed.checkpoint, and what the command line tells of them."""

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch_checkpoint_script
from resumable_training import Net, Run, start
from typer.testing import CliRunner
from worker_processes import run_ranks

import pipec
from pipec.cli import app

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:Detected an existing")


def cli(command: str, *arguments: object, status: int = 0) -> str:
    words = ["checkpoint"] * (command == "convert")
    result = CliRunner().invoke(app, [*words, command, *map(str, arguments)])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


@pytest.fixture(scope="module")
def run() -> Run:
    made = start("2 stages")
    made.train(0, 3)
    return made


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> Path:
    run.save(tmp_path / "saved", extra={"seen": (1, 2)})
    return tmp_path / "saved"


def test_there_and_back_is_the_same_training(run: Run, saved: Path, tmp_path: Path) -> None:
    cli("convert", saved, tmp_path / "torch")
    cli("convert", tmp_path / "torch", tmp_path / "back")
    assert run.load(tmp_path / "back") == {"seen": (1, 2)}
    losses = run.train(3, 5)
    run.load(saved)
    assert run.train(3, 5) == losses
    assert (tmp_path / "back" / "checkpoint.pt").read_bytes() == (saved / "checkpoint.pt").read_bytes()


def test_of_a_foreign_folder_weights_and_the_state_of_a_named_optimizer_are_taken(
    run: Run, tmp_path: Path
) -> None:
    groups = [{"lr": 0.1, "params": ["head.weight"]}]
    state = {"model": Net(tied=False).double().state_dict(), "optim": {"param_groups": groups}}
    dcp.save({"app": state, "epoch": 3}, checkpoint_id=tmp_path / "torch", no_dist=True)
    said = cli("convert", tmp_path / "torch", tmp_path / "made", status=2)
    assert "pass it, such as --optimizer AdamW" in " ".join(said.split())
    assert "skipped: epoch" in cli("convert", tmp_path / "torch", tmp_path / "made", "--optimizer", "AdamW")
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
    said = " ".join(cli("convert", folder, tmp_path / "made", "--optimizer", "SGD", status=1).split())
    assert "mkdir" in said
    assert [path.name for path in tmp_path.iterdir()] == ["torch"]


def test_a_file_outside_of_a_folder_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "torch" / ".metadata"
    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=path.parent, no_dist=True)
    found = pickle.loads(path.read_bytes())
    ((key, place),) = found.storage_data.items()
    found.storage_data = {key: replace(place, relative_path="../other")}
    path.write_bytes(pickle.dumps(found))
    said = " ".join(cli("convert", path.parent, tmp_path / "made", status=1).split())
    assert "names a file outside its folder" in said


def test_what_is_in_a_checkpoint(run: Run, saved: Path, tmp_path: Path) -> None:
    facts = json.loads(cli("check", saved, "--json"))
    assert facts["num_steps"] == run.pipe.num_steps
    assert facts["weights"] == {"tensors": 10, "bytes": facts["weights"]["bytes"]}
    assert facts["schedulers"] == ["OneCycleLR"]
    assert [group["optimizer"] for group in facts["groups"]] == ["AdamW"] * 2
    assert f"{saved} is a valid checkpoint, after {facts['num_steps']} steps" in cli("check", saved)
    assert "is no artifact and no checkpoint" in " ".join(cli("check", tmp_path, status=1).split())
    content = bytearray((saved / "checkpoint.pt").read_bytes())
    content[100] ^= 1
    (saved / "checkpoint.pt").write_bytes(content)
    for arguments in (("check", saved), ("convert", saved, tmp_path / "other")):
        assert "checkpoint.pt is not what was saved" in " ".join(cli(*arguments, status=1).split())
    assert not (tmp_path / "other").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").touch()
    cli("convert", saved, tmp_path / "other", status=1)


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
    assert found["model"].keys() == expected["model"].keys()
    for name, x in expected["model"].items():
        assert torch.equal(found["model"][name], x), name
    states = [each["optim"]["state"] for each in (found, expected)]
    assert states[0].keys() == states[1].keys()
    assert states[1]
    for name, entries in states[1].items():
        assert entries.keys() == states[0][name].keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, x in entries.items():
            assert torch.equal(states[0][name][key], x), (name, key)
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
