"""Files of every released format are read for ever, and a file of an unknown format is refused by its name.

``tests/formats/VERSION`` keeps small files as that version of pipec wrote them. They are never changed. When
a format changes, ``python tests/test_formats.py VERSION`` writes the folder of the new version, with the
topology and the schedule of the last one.
"""

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import pipec
from pipec.checkpoint import metadata
from pipec.cost.profile import load_profile
from pipec.errors import CheckpointError, PipecError, PlanError
from pipec.hardware import topology
from pipec.schedules import parse_orders

FORMATS = Path(__file__).parent / "formats"
VERSIONS = sorted(folder.name for folder in FORMATS.iterdir())

BATCH = torch.arange(8.0).reshape(4, 2) / 4
"""Every number of a step is exact in float32, so that eager torch has the same loss to the bit."""

TARGET = torch.ones(4, 1)


def model() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 2)
    return net


def pipeline(net: nn.Module) -> pipec.Pipeline:
    sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
    return pipec.compile(net, devices=2, microbatches=2, loss_fn=nn.functional.mse_loss, optimizer=sgd)


def write(folder: Path) -> None:
    """Write one file of each format, as this pipec does."""
    folder.mkdir(parents=True)
    pipe = pipeline(model()).prepare(BATCH, target=TARGET)
    pipe.save(folder / "artifact", tensors=True)
    pipe.step(BATCH, target=TARGET)
    pipe.save_checkpoint(folder / "checkpoint")
    example = pipec.Example(model(), (BATCH,), target=TARGET, loss_fn=nn.functional.mse_loss)
    pipec.profile(example, microbatch_size=2, repeats=1).save(folder / "profile.json")
    for name in ("topology.toml", "schedule.csv"):
        shutil.copy(FORMATS / VERSIONS[-1] / name, folder)


def read_artifact(path: Path) -> None:
    loss = pipec.load(path, optimizer=partial(torch.optim.SGD, lr=0.5)).step(BATCH, target=TARGET)
    assert loss.item() == nn.functional.mse_loss(model()(BATCH), TARGET).item()


def read_checkpoint(path: Path) -> None:
    once, loaded = pipeline(model()), pipeline(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))
    once.step(BATCH, target=TARGET)
    loaded.load_checkpoint(path)
    assert loaded.num_steps == 1
    for name, value in once.full_state_dict().items():
        assert torch.equal(loaded.full_state_dict()[name], value), name
    assert loaded.step(BATCH, target=TARGET).item() == once.step(BATCH, target=TARGET).item()


def read_profile(path: Path) -> None:
    profile = load_profile(path)
    assert profile.microbatch_size == 2
    assert {each.name for each in profile.operators}


def read_topology_file(path: Path) -> None:
    level = {"size": 2, "bytes_per_second": 12e9, "latency_seconds": 5e-6}
    devices = [{"memory_bytes": 16e9}, {"memory_bytes": 16e9}]
    assert topology.read_topology(path) == pipec.Topology.of({"devices": devices, "levels": [level]})


def read_schedule(path: Path) -> None:
    schedule = parse_orders(path.read_text(encoding="utf-8"), "schedule")
    assert (schedule.num_ranks, schedule.num_microbatches) == (2, 2)


READERS: dict[str, Callable[[Path], None]] = {
    "artifact": read_artifact,
    "checkpoint": read_checkpoint,
    "profile.json": read_profile,
    "topology.toml": read_topology_file,
    "schedule.csv": read_schedule,
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", READERS)
def test_a_file_of_each_version_is_read(version: str, name: str) -> None:
    READERS[name](FORMATS / version / name)


def test_every_version_has_every_file() -> None:
    assert VERSIONS
    for version in VERSIONS:
        assert {path.name for path in (FORMATS / version).iterdir()} == READERS.keys()
    size = sum(path.stat().st_size for path in FORMATS.rglob("*") if path.is_file())
    assert size < 100_000 * len(VERSIONS)


CHECKED: dict[str, tuple[ModuleType, type[PipecError]]] = {
    "checkpoint": (metadata, CheckpointError),
    "topology.toml": (topology, PlanError),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_file_of_another_format_is_refused_and_both_are_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, error = CHECKED[name]
    written = module.FORMAT
    monkeypatch.setattr(module, "FORMAT", f"{written}9")
    with pytest.raises(error, match=rf"'{written}', .*reads '{written}9'"):
        READERS[name](FORMATS / VERSIONS[-1] / name)


if __name__ == "__main__":
    write(FORMATS / sys.argv[1])
