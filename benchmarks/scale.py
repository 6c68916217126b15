"""Plans and schedules of the size of a cluster: CPU seconds and peak memory of each command, as a table.

Each row is a process of its own, imports included. ``--only 2`` runs the rows whose commands contain a 2.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import row, table
from torch import nn

import pipec

CLUSTER = """
[[devices]]
count = 10000
memory_bytes = 80e9

[[levels]]
size = 8
bytes_per_second = 450e9

[[levels]]
size = 1250
bytes_per_second = 50e9
latency_seconds = 1e-5
"""

TARGET = f"{Path(__file__)}:example"
COMMANDS = (
    "schedule 1f1b --stages 16 --replicas 625 --microbatches 10000",
    "schedule 1f1b --stages 1024 --microbatches 4096",
    "schedule 1f1b --stages 1024 --microbatches 4096 -o OUT",
    "plan TARGET --devices 10000 --stages 8 --microbatches 10000",
    "plan TARGET --topology CLUSTER --stages 8",
    "plan TARGET --topology CLUSTER --replicas auto",
)


def example() -> pipec.Example:
    """16 wide layers, and a mini-batch of two rows for each of 10,000 microbatches."""
    with torch.device("meta"):
        layers = [layer for _ in range(16) for layer in (nn.Linear(1024, 1024), nn.Tanh())]
        model, x = nn.Sequential(*layers), torch.empty(20_000, 1024)
    return pipec.Example(model, (x,), target=torch.empty_like(x), loss_fn=nn.functional.mse_loss)


def measured(command: str, folder: Path) -> str:
    """What a command takes, in a process of its own."""
    (folder / "cluster.toml").write_text(CLUSTER)
    names = {"TARGET": TARGET, "CLUSTER": str(folder / "cluster.toml"), "OUT": str(folder / "out.html")}
    words = [names.get(word, word) for word in command.split()]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "pipec", *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return row(f"`{command}`", f"{seconds:.1f}", f"{after.ru_maxrss / 2**20:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="Only commands that contain this.")
    args = parser.parse_args()
    pipec.log("\n".join(table("command", "CPU seconds", "GiB, the most of any so far")))
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            if args.only in command:
                pipec.log(measured(command, Path(folder)))


if __name__ == "__main__":
    main()
