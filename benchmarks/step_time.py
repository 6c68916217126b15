"""Step time of one model on two ranks of one thread each: unsplit, pipec, and torch.distributed.pipelining.

A step is the forward and backward of a mini-batch of 8 microbatches, with the zeroing of gradients and
without the optimizer. Every contestant runs alone in fresh processes; rounds alternate between the
contestants, so that a change in the machine's speed meets all of them. The 1F1B bound is the unsplit time
times (m + p - 1) / (m p), for m microbatches and p ranks: perfectly balanced stages, free communication.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from models import gpt, next_token_loss
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import pipec

MICROBATCHES, RANKS = 8, 2
BATCH, CONTEXT = 16, 128
WARMUP_STEPS = 3
BOUND = (MICROBATCHES + RANKS - 1) / (MICROBATCHES * RANKS)
PEER = "torch.distributed.pipelining"


@dataclass(frozen=True)
class Case:
    """An 8-layer GPT and a mini-batch for it."""

    name: str
    width: int
    vocabulary: int

    def model(self) -> torch.nn.Sequential:
        torch.manual_seed(0)
        return gpt(self.width, self.vocabulary, CONTEXT)

    def batch(self) -> tuple[Tensor, Tensor]:
        """``int64[batch, context]`` tokens, and the tokens that follow them."""
        text = torch.randint(
            self.vocabulary, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
        )
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


CASES = {
    case.name: case
    for case in (Case("width 64", 64, 256), Case("width 256", 256, 256), Case("32k vocabulary", 256, 32768))
}

Step = Callable[[], Tensor | None]
"""Runs one step; returns the mini-batch loss on the ranks that know it."""


def unsplit_step(case: Case) -> Step:
    model, batch = case.model(), case.batch()
    microbatches = list(zip(*(tensor.chunk(MICROBATCHES) for tensor in batch), strict=True))

    def step() -> Tensor:
        model.zero_grad()
        total = torch.zeros(())
        for tokens, target in microbatches:
            loss = next_token_loss(model(tokens), target) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        return total

    return step


def pipec_step(case: Case) -> Step:
    tokens, target = case.batch()
    pipe = pipec.compile(
        case.model(),
        devices=RANKS,
        loss_fn=next_token_loss,
        schedule="1f1b",
        microbatches=MICROBATCHES,
        recompute="none",
    )

    def step() -> Tensor:
        pipe.zero_grad()
        return pipe.step(tokens, target=target)

    return step


def peer_step(case: Case) -> Step:
    """Equal halves, cut by hand: the embedding with the first four blocks, the output layer with the last."""
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), case.model()
    middle = len(model) // 2
    half = model[:middle] if rank == 0 else model[middle:]
    stage = PipelineStage(half, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=next_token_loss)
    tokens, target = case.batch()

    def step() -> Tensor | None:
        half.zero_grad()
        if rank == 0:
            schedule.step(tokens, return_outputs=False)
            return None
        losses: list[Tensor] = []
        schedule.step(target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean()

    return step


@dataclass(frozen=True)
class Contestant:
    """How to make a step function, and in how many processes it runs."""

    make_step: Callable[[Case], Step]
    num_processes: int


CONTESTANTS = {
    "unsplit": Contestant(unsplit_step, 1),
    "pipec, one process": Contestant(pipec_step, 1),
    "pipec, torchrun": Contestant(pipec_step, RANKS),
    PEER: Contestant(peer_step, RANKS),
}


def measure_here(contestant: str, case: Case, num_steps: int, folder: Path) -> None:
    """In a process of the contestant: time the steps; leave the seconds and the first loss in ``folder``."""
    torch.set_num_threads(1)
    step = CONTESTANTS[contestant].make_step(case)
    loss = step()
    for _ in range(WARMUP_STEPS - 1):
        step()
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    result = {"seconds": seconds, "loss": None if loss is None else loss.item()}
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(contestant: str, case: Case, num_steps: int) -> tuple[list[float], float]:
    """Seconds of each step on rank 0, where the last backward ends, and the last rank's first loss."""
    num_processes = CONTESTANTS[contestant].num_processes
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--measure-here", contestant, case.name, folder, "--steps", str(num_steps)]
        command = [sys.executable, *(launcher if num_processes > 1 else []), __file__, *arguments]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{contestant} failed on {case.name}:\n{done.stdout}{done.stderr}")
        first, last = (
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, num_processes - 1)
        )
    return first["seconds"], last["loss"]


def compare(case: Case, contestants: list[str], num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Seconds of every timed step by contestant, over rounds that alternate; all must agree on the loss."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    losses = {}
    for _, name in (bar := pipec.progress([*itertools.product(range(num_rounds), contestants)], case.name)):
        bar.show(name)
        measured, losses[name] = measure(name, case, num_steps)
        seconds[name] += measured
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise RuntimeError(f"the contestants disagree on the loss of {case.name}: {losses}")
    return seconds


@dataclass(frozen=True)
class Row:
    """One line of the table; ``None`` where the contestant to compare with did not run."""

    case: str
    contestant: str
    median_ms: float
    min_ms: float
    max_ms: float
    times_peer: float | None
    times_bound: float | None


def table_rows(case: str, seconds: dict[str, list[float]]) -> list[Row]:
    milliseconds = {name: [1e3 * value for value in values] for name, values in seconds.items()}
    if "unsplit" in milliseconds:
        milliseconds["1F1B bound"] = [BOUND * value for value in milliseconds["unsplit"]]
    medians = {name: statistics.median(values) for name, values in milliseconds.items()}

    def ratio(name: str, reference: str) -> float | None:
        return medians[name] / medians[reference] if reference in medians else None

    return [
        Row(case, name, medians[name], min(values), max(values), ratio(name, PEER), ratio(name, "1F1B bound"))
        for name, values in milliseconds.items()
    ]


def markdown(rows: list[Row]) -> str:
    def times(ratio: float | None) -> str:
        return "" if ratio is None else f"{ratio:.2f}"

    lines = [
        "| model | contestant | median ms | min to max | / peer | / bound |",
        "|---|---|--:|--:|--:|--:|",
        *(
            f"| {row.case} | {row.contestant} | {row.median_ms:.0f} | {row.min_ms:.0f} to {row.max_ms:.0f} "
            f"| {times(row.times_peer)} | {times(row.times_bound)} |"
            for row in rows
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=[*CONTESTANTS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each contestant in each round")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table instead of JSON")
    parser.add_argument("--measure-here", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.measure_here:
        contestant, case, folder = args.measure_here
        measure_here(contestant, CASES[case], args.steps, Path(folder))
        return

    rows = []
    for case in args.cases:
        rows += table_rows(case, compare(CASES[case], args.contestants, args.rounds, args.steps))
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    if args.markdown:
        print(f"{markdown(rows)}\n\n{machine}; {RANKS} ranks of 1 thread, {MICROBATCHES} microbatches")
    else:
        print(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2))


if __name__ == "__main__":
    main()
