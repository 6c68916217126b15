"""Checkpoints to and from torch.distributed.checkpoint, and what the command line tells of them."""

import functools
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from resumable_training import Net, Run, batches, decayed, start
from torch import optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from typer.testing import CliRunner

import pipec
from pipec.checkpoint.shards import open_tensors
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


class Plain:
    """The same model and optimizer in plain torch, without dropout."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net().double().eval()
        self.optimizer = decayed(self.model.named_parameters())

    def step(self, words: torch.Tensor) -> float:
        loss = self.model(words)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @property
    def state(self) -> dict[str, Any]:
        return dict(zip(("model", "optim"), get_state_dict(self.model, self.optimizer), strict=True))

    def load(self, path: Path) -> None:
        state = self.state
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )


@pytest.mark.slow
def test_torch_goes_on_from_a_checkpoint(run: Run, saved: Path, tmp_path: Path) -> None:
    cli("convert", saved, tmp_path / "torch")
    plain = Plain(seed=7)
    plain.step(next(batches(0, 1)))  # so that its optimizer has a state to load into
    plain.load(tmp_path / "torch")
    for name, tensor in run.pipe.state_dict().items():
        assert torch.equal(plain.model.state_dict()[name], tensor)
    run.pipe.eval()
    losses = [float(run.pipe.step(words)) for words in batches(3, 5)]
    run.pipe.train()
    assert [plain.step(words) for words in batches(3, 5)] == pytest.approx(losses, rel=1e-12)


@pytest.mark.slow
def test_pipec_goes_on_from_torch(run: Run, tmp_path: Path) -> None:
    plain = Plain(seed=5)
    for words in batches(0, 2):
        plain.step(words)
    dcp.save({"app": plain.state, "epoch": 3}, checkpoint_id=tmp_path / "torch")
    losses = [plain.step(words) for words in batches(2, 4)]
    said = cli("convert", tmp_path / "torch", tmp_path / "made", status=2)
    assert "pass it, such as --optimizer AdamW" in " ".join(said.split())
    options = ("--optimizer", "AdamW", "--num-steps", "2")
    assert "skipped: epoch" in cli("convert", tmp_path / "torch", tmp_path / "made", *options)
    run.pipe.load_checkpoint(tmp_path / "made")
    assert run.pipe.num_steps == 2
    run.pipe.eval()
    assert [float(run.pipe.step(words)) for words in batches(2, 4)] == pytest.approx(losses, rel=1e-12)
    run.pipe.train()
    other = start("1 stage", factory=functools.partial(optim.SGD, lr=0.1))
    with pytest.raises(pipec.CheckpointError, match="has the state of AdamW"):
        other.pipe.load_checkpoint(tmp_path / "made")


def test_there_and_back_is_the_same_training(run: Run, saved: Path, tmp_path: Path) -> None:
    cli("convert", saved, tmp_path / "torch")
    cli("convert", tmp_path / "torch", tmp_path / "back")
    assert run.load(tmp_path / "back") == {"seen": (1, 2)}
    losses = run.train(3, 5)
    run.load(saved)
    assert run.train(3, 5) == losses
    assert (tmp_path / "back" / "checkpoint.pt").read_bytes() == (saved / "checkpoint.pt").read_bytes()


def test_tied_weights_that_differ_are_refused(run: Run, tmp_path: Path) -> None:
    state = Net(tied=False).double().state_dict()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "torch", no_dist=True)
    cli("convert", tmp_path / "torch", tmp_path / "made")
    with pytest.raises(pipec.CheckpointError, match=r"head\.weight and words\.weight differ in the file"):
        run.pipe.load_checkpoint(tmp_path / "made", model_only=True)


def test_parts_that_processes_wrote_come_together(tmp_path: Path) -> None:
    """As of a sharded tensor, of which each process writes its rows."""
    from torch.distributed.checkpoint import metadata as names

    whole = torch.arange(12.0).view(4, 3)
    dcp.save({"model": {"a": whole[:2].clone()}}, checkpoint_id=tmp_path, no_dist=True)
    shutil.copy(tmp_path / "__0_0.distcp", tmp_path / "first")
    dcp.save({"model": {"a": whole[2:].clone()}}, checkpoint_id=tmp_path, no_dist=True)
    with (tmp_path / ".metadata").open("rb") as file:
        found = pickle.load(file)
    entry, (place,) = found.state_dict_metadata["model.a"], found.storage_data.values()
    entry.size = whole.shape
    entry.chunks = [names.ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 3])) for row in (0, 2)]
    found.storage_data = {
        names.MetadataIndex("model.a", torch.Size([row, 0])): type(place)(file, place.offset, place.length)
        for row, file in ((0, "first"), (2, "__0_0.distcp"))
    }
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    cli("convert", tmp_path, tmp_path / "made")
    made = open_tensors((tmp_path / "made").glob("*.safetensors"))
    assert torch.equal(made["a"], whole)


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
