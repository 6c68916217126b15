"""Whether a long training keeps its memory, files and threads: batch sizes and lengths change at every step.

python benchmarks/soak.py                 # 5,000 steps in one process, and as many over two
python benchmarks/soak.py --steps 300     # a short look: 300 steps after the warm-up

A checkpoint is written in the background every so often, and a batch is evaluated. The warm-up has 1,000
steps, since messages between ranks of one host get further shared memory, up to a limit, whenever a rank
first runs further ahead than before. The exit status is 1 if anything is larger at the end than after it.
"""

import argparse
import functools
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from models import gpt, next_token_loss
from torch import Tensor

import pipec

VOCABULARY, CONTEXT, WIDTH = 64, 32, 32
WARM_UP = 1000
ROWS, LENGTHS = (4, 6, 8, 12), (8, 13, 24, 32)
PAGE = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True)
class Sample:
    """What a process holds: MiB of resident memory, open files, threads."""

    memory: float
    files: int
    threads: int

    @classmethod
    def now(cls) -> "Sample":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(pages * PAGE, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    chosen = random.Random(0)
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        size = (chosen.choice(ROWS), chosen.choice(LENGTHS) + 1)
        words = torch.randint(VOCABULARY, size, generator=generator)
        yield words[:, :-1], words[:, 1:]


def soak(steps: int, directory: Path) -> list[Sample]:
    """What this process holds, a hundred times after the warm-up."""
    torch.manual_seed(0)
    pipe = pipec.compile(
        gpt(WIDTH, VOCABULARY, CONTEXT, num_layers=2),
        2,
        loss_fn=next_token_loss,
        microbatches=2,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
    )
    checkpoints = pipec.CheckpointManager(directory, every=max(1, steps // 50), keep=2, asynchronous=True)
    samples = []
    for number, (words, target) in enumerate(batches(WARM_UP + steps)):
        pipe.step(words, target=target)
        checkpoints.step(pipe, extra=number)
        if number % 10 == 0:
            pipe.eval_step(words, target=target)
        if number >= WARM_UP and number % max(1, steps // 100) == 0:
            pipe.finish_saving()
            samples.append(Sample.now())
    return samples


@dataclass(frozen=True)
class Row:
    """What was held after warm-up and at the end, by some samples each."""

    where: str
    what: str
    first: float
    last: float
    allowed: float

    @property
    def grows(self) -> bool:
        return self.last - self.first > self.allowed


def rows(where: str, samples: list[Sample]) -> Iterator[Row]:
    fifth = len(samples) // 5
    first, last = samples[fifth : 2 * fifth], samples[-fifth:]

    memory, memory_at_end = (statistics.median(sample.memory for sample in each) for each in (first, last))
    yield Row(where, "MiB of memory", memory, memory_at_end, 0.01 * memory)
    # The least, since the thread that has written a checkpoint may not have ended when a sample is taken.
    yield Row(where, "open files", *(min(sample.files for sample in each) for each in (first, last)), 0)
    yield Row(where, "threads", *(min(sample.threads for sample in each) for each in (first, last)), 0)


def table(found: list[Row]) -> Iterator[str]:
    if not found[0].where.startswith("rank"):
        yield "| where | what | after warm-up | at the end | |"
        yield "|---|---|--:|--:|---|"
    for row in found:
        numbers = f"{row.first:.6g} | {row.last:.6g}"
        yield f"| {row.where} | {row.what} | {numbers} | {'grows' if row.grows else 'flat'} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000, help="how many after the warm-up")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    rank = os.environ.get("RANK")
    with tempfile.TemporaryDirectory() as made:
        directory = Path(os.environ.get(_DIRECTORY, made))
        where = "one process" if rank is None else f"rank {rank} of two"
        found = list(rows(where, soak(steps, directory / "run")))
        print("\n".join(table(found)), flush=True)
        grows = any(row.grows for row in found)
        if rank is None:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
            environment = os.environ | {_DIRECTORY: str(directory / "two")}
            grows |= (
                subprocess.run(
                    [sys.executable, *launch, "--steps", str(steps)], env=environment, check=False
                ).returncode
                != 0
            )
    return int(grows)


_DIRECTORY = "PIPEC_SOAK_DIRECTORY"
"""Where all ranks write their checkpoints."""


if __name__ == "__main__":
    sys.exit(main())
