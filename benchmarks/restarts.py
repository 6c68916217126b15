"""How long a training stands still after a rank was killed, and where that time goes.

    python benchmarks/restarts.py --rounds 5

Each round is a script under ``torchrun --max-restarts`` on two ranks, one of which is killed after a step.
The time is that from there until the first new step is made, the median of the rounds, part by part.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import pipec

RANKS, EVERY, KILLED_AFTER, VICTIM = 2, 4, 7, 1

PARTS = {
    "born": "torchrun notices, ends the others and starts new processes",
    "imported": "they import torch and pipec",
    "met": "they meet, and compare what they were given",
    "loaded": "they check and load the checkpoint",
    "compiled": "one of them compiles",
    "stepped": "the first step",
}
"""What ends each part of the time, in the order of these events, and what the part is."""


def train(folder: Path) -> None:
    """What a rank runs; it notes when it came to each event."""
    note = partial(_note, folder)
    note("born", _born())
    pipec.compile  # noqa: B018, for it is imported here
    note("imported")
    torch.manual_seed(0)
    layers = (layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)))
    pipe = pipec.compile(
        nn.Sequential(*layers),
        loss_fn=nn.functional.mse_loss,
        microbatches=4,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
    )
    note("met")
    checkpoints = pipec.CheckpointManager(folder / "checkpoints", every=EVERY, keep=2)
    checkpoints.resume(pipe)
    note("loaded")
    x, target = torch.randn(16, 64), torch.randn(16, 64)
    pipe.prepare(x, target=target)
    note("compiled")
    begun = pipe.num_steps
    while pipe.num_steps < KILLED_AFTER:
        pipe.step(x, target=target)
        if pipe.num_steps == begun + 1:
            note("stepped")
        checkpoints.step(pipe)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == str(VICTIM):
        note("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.step(x, target=target)


def _note(folder: Path, event: str, at: float | None = None) -> None:
    started = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"{event}_{started}_{os.environ['RANK']}").write_text(str(at if at is not None else _now()))


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _born() -> float:
    """When this process began."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def measured() -> dict[str, float]:
    """The seconds of each part, of one round. A part ends when the last rank has come to its end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        given = [*command, "--max-restarts=1", __file__, "--train", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(given, capture_output=True, text=True, env=environment, timeout=300)
        if done.returncode or "goes on after step 4" not in done.stdout + done.stderr:
            raise RuntimeError(done.stdout + done.stderr)
        before = float(Path(folder, f"killed_0_{VICTIM}").read_text())
        parts = {}
        for event in PARTS:
            at = max(float(Path(folder, f"{event}_1_{rank}").read_text()) for rank in range(RANKS))
            parts[event], before = at - before, at
    return parts


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = given.parse_args()
    if options.train:
        return train(options.train)
    rounds = [measured() for _ in range(options.rounds)]
    print(f"| after the kill | seconds, median of {len(rounds)} |\n|---|---|")
    for event, what in PARTS.items():
        print(f"| {what} | {statistics.median(parts[event] for parts in rounds):.2f} |")
    print(f"| **until the first new step** | **{statistics.median(sum(p.values()) for p in rounds):.2f}** |")
    print(f"\nsteps made again: {KILLED_AFTER % EVERY}, at most {EVERY - 1}")


if __name__ == "__main__":
    main()
