"""Saving and loading a training with Adam: pipec, torch.save and torch.distributed.checkpoint.

python benchmarks/checkpoints.py                       # 800 MB, ten rounds
python benchmarks/checkpoints.py --width 256 --rounds 2    # a short look

Each contestant saves what is on the disk when it returns, and loads into a model and its optimizer, in turns.
The files are in the page cache when they are loaded. Of asynchronous saves it tells for how long training
stands still, and how much longer a step takes while one goes on.
"""

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import row
from common import table as heading
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import pipec
from pipec.console import log

ADAM = functools.partial(optim.AdamW, lr=1e-3)
LAYERS, ROWS = 16, 8


@dataclass(frozen=True)
class Contestant:
    """``begin`` saves in the background; what it returns waits for the end of that."""

    name: str
    save: Callable[[Path], Any]
    load: Callable[[Path], Any]
    begin: Callable[[Path], Callable[[], Any]] | None = None


def layers(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def with_pipec(pipe: pipec.Pipeline) -> Contestant:
    def begin(path: Path) -> Callable[[], Any]:
        return pipe.save_checkpoint(path, asynchronous=True).result

    return Contestant("pipec", pipe.save_checkpoint, pipe.load_checkpoint, begin)


def with_torch(model: nn.Module, optimizer: optim.Optimizer) -> Contestant:
    def save(path: Path) -> None:
        with path.open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def load(path: Path) -> None:
        found = torch.load(path)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])

    return Contestant("torch.save and fsync", save, load)


def with_dcp(model: nn.Module, optimizer: optim.Optimizer) -> Contestant:
    def state() -> dict[str, Any]:
        return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))

    def load(path: Path) -> None:
        dcp.load(found := state(), checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])

    def begin(path: Path) -> Callable[[], Any]:
        return dcp.async_save(state(), checkpoint_id=path).result

    def save(path: Path) -> None:
        dcp.save(state(), checkpoint_id=path)

    return Contestant("torch.distributed.checkpoint", save, load, begin)


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


@dataclass
class Times:
    """Seconds of each contestant, by what it did."""

    of: dict[tuple[str, str], list[float]]

    def median(self, name: str, what: str) -> float:
        return statistics.median(self.of[name, what])


def measure(contestants: list[Contestant], step: Callable[[], Any], rounds: int, folder: Path) -> Times:
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(rounds):
        for each in contestants:
            path = folder / f"{each.name}-{number}"
            times[each.name, "save"].append(seconds(lambda: each.save(path)))  # noqa: B023
            times[each.name, "load"].append(seconds(lambda: each.load(path)))  # noqa: B023
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            times[each.name, "step alone"].append(seconds(step))
            if each.begin is not None:
                waits: list[Callable[[], Any]] = []
                pause = seconds(lambda: waits.append(each.begin(path)))  # noqa: B023
                times[each.name, "pause"].append(pause)
                times[each.name, "step beside"].append(seconds(step))
                waits[0]()
                shutil.rmtree(path)
    return Times(times)


def table(contestants: list[Contestant], times: Times, size: float) -> Iterator[str]:
    yield from heading("", "save ms", "MB/s", "/ pipec", "load ms", "MB/s", "/ pipec")
    for each in contestants:
        cells = [each.name]
        for what in ("save", "load"):
            took, ours = times.median(each.name, what), times.median("pipec", what)
            cells += [f"{1e3 * took:.0f}", f"{size / took / 1e6:.0f}", f"{took / ours:.2f}"]
        yield row(*cells)
    yield ""
    yield from heading(
        "asynchronous", "training pauses, ms", "of a save", "step ms", "step during a save, ms"
    )
    for each in contestants:
        if each.begin is not None:
            pause, save = times.median(each.name, "pause"), times.median(each.name, "save")
            steps = (f"{1e3 * times.median(each.name, what):.0f}" for what in ("step alone", "step beside"))
            yield row(each.name, f"{1e3 * pause:.0f}", f"{pause / save:.0%}", *steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.randn(ROWS, given.width)
    loss_fn = nn.functional.mse_loss
    pipe = pipec.compile(layers(given.width), 1, loss_fn=loss_fn, microbatches=2, optimizer=ADAM)
    model = layers(given.width)
    optimizer = ADAM(model.parameters())

    def step() -> None:
        pipe.step(x, target=x)

    step()
    loss_fn(model(x), x).backward()
    optimizer.step()
    optimizer.zero_grad()
    size = 3 * sum(each.nbytes for each in model.parameters())
    contestants = [with_pipec(pipe), with_torch(model, optimizer), with_dcp(model, optimizer)]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        times = measure(contestants, step, given.rounds, Path(folder))
    log(f"{size / 1e6:.0f} MB in one process, medians of {given.rounds} rounds")
    log("\n".join(table(contestants, times, size)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
