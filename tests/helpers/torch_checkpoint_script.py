"""A rank that loads a training, notes its state, goes on for two steps, notes it again, and saves it.

    pipec FOLDER SOURCE OPTIONS     from a checkpoint of pipec, with options of compile as JSON
    torch FOLDER SOURCE             from a folder of torch.distributed.checkpoint; with ranks under FSDP2

SOURCE is "-" for a new training. FOLDER gets ``loaded.pt`` and ``trained.pt``, the whole model's weights and
its optimizer's state by name; ``torch``, a folder of torch.distributed.checkpoint; and from pipec ``pipec``,
a checkpoint, or from torch ``flat``, a folder with ``flatten_optimizer_state_dict``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from resumable_training import Net, batches, decayed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import pipec


def by_name(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with names of parameters, as torch's get_optimizer_state_dict has it."""
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    groups = [{**group, "params": group["param_names"]} for group in state["param_groups"]]
    for group in groups:
        del group["param_names"]
    return {"state": {names[k]: entries for k, entries in state["state"].items()}, "param_groups": groups}


def note(state: dict[str, Any], path: Path) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        torch.save(state, path)


def with_pipec(folder: Path, source: str, options: dict[str, Any]) -> None:
    model = Net().double().eval()
    pipe = pipec.compile(model, microbatches=2, optimizer=decayed, **options)

    def state() -> dict[str, Any]:
        return {"model": pipe.state_dict(), "optim": by_name(pipe.optimizer.state_dict())}

    if source != "-":
        pipe.load_checkpoint(source)
    note(state(), folder / "loaded.pt")
    for words in batches(0, 2):
        pipe.step(words)
    note(state(), folder / "trained.pt")
    pipe.save_checkpoint(folder / "pipec")

    dcp.save(state(), checkpoint_id=folder / "torch")

    found = state()
    for words in batches(2, 3):
        pipe.step(words)  # which the load has to undo
    dcp.load(found, checkpoint_id=folder / "torch")
    pipe.load_state_dict(found["model"])
    pipe.optimizer.load_state_dict(found["optim"])
    note(state(), folder / "again.pt")


def with_torch(folder: Path, source: str) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = Net().double().eval()
    if dist.is_initialized():
        fully_shard(model.body)
        fully_shard(model)
    optimizer = decayed(model.named_parameters())

    def state(**options: Any) -> dict[str, Any]:
        found = get_state_dict(model, optimizer, options=StateDictOptions(**options))
        return dict(zip(("model", "optim"), found, strict=True))

    if source != "-":
        found = state()
        dcp.load(found, checkpoint_id=source)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])
    note(state(full_state_dict=True, cpu_offload=True), folder / "loaded.pt")
    for words in batches(0, 2):
        model(words).backward()
        optimizer.step()
        optimizer.zero_grad()
    note(state(full_state_dict=True, cpu_offload=True), folder / "trained.pt")
    dcp.save(state(), checkpoint_id=folder / "torch")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    flattened = get_optimizer_state_dict(model, optimizer, options=flat)
    dcp.save({"model": state()["model"], "optim": flattened}, checkpoint_id=folder / "flat")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    side, target, begin, *given = sys.argv[1:]
    Path(target).mkdir(exist_ok=True)
    if side == "pipec":
        with_pipec(Path(target), begin, json.loads(given[0]))
    else:
        with_torch(Path(target), begin)
