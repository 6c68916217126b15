"""Where the time of a 1F1B step goes, rank by rank, by the events that pipec records.

    torchrun --nproc-per-node 2 benchmarks/account.py [--case "width 64"] [--steps 31]

The model and the step are those of ``step_time.py``. Each row is the median over the steps. The first row is
what a step would take whose stages take as long as these take on average, and whose messages take no time.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from step_time import CASES, MICROBATCHES, RANKS, WARMUP_STEPS, pipeline

from pipec.ir import OpKind, Program
from pipec.runtime.step.timestamps import Timestamps

STEP = "the step"
COMPUTES = "computes: stage functions, sums of gradients"
FILLS = "waits while the pipeline fills and drains"
WAITS = "waits longer for what it needs"
POSTS = "posts receives and sends"
BEFORE = "before the first instruction: zeroes gradients, checks, compares with other ranks"
REST = "between instructions, and after the last"
ROWS = (STEP, COMPUTES, FILLS, WAITS, POSTS, BEFORE, REST)


def account(program: Program, timestamps: Timestamps, begun: int, ended: int) -> dict[str, float]:
    """Milliseconds of each part of one step on one rank. ``begun`` and ``ended`` are those of the call."""
    parts: dict[str, float] = defaultdict(float)
    waited = 0.0
    for number, instruction in enumerate(program.instructions):
        start, arrived, end = timestamps[3 * number : 3 * number + 3]
        computes = instruction.op.traits.kind in (
            OpKind.COMPUTE,
            OpKind.RELEASE,
        )  # which adds gradients first
        parts[COMPUTES if computes else POSTS] += 1e-6 * (end - arrived)
        waited += 1e-6 * (arrived - start)
    parts[FILLS] = min(waited, parts[COMPUTES] / MICROBATCHES * (RANKS - 1))
    parts[WAITS] = waited - parts[FILLS]
    parts[BEFORE] = 1e-6 * (timestamps[0] - begun)
    parts[REST] = 1e-6 * (ended - begun) - sum(parts.values())
    parts[STEP] = 1e-6 * (ended - begun)
    return parts


def medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in steps) for name in ROWS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="width 64")
    parser.add_argument("--steps", type=int, default=31)
    args = parser.parse_args()
    torch.set_num_threads(1)
    case = CASES[args.case]
    pipe, (inputs, target) = pipeline(case), case.batch()
    rank, accounts = int(os.environ["RANK"]), []
    for _ in range(WARMUP_STEPS + args.steps):
        with pipe.record() as recording:
            begun = time.time_ns()
            pipe.zero_grad()
            pipe.step(inputs, target=target)
            ended = time.time_ns()
        (step,) = recording.steps
        accounts.append(account(step.programs[rank], step.timestamps[rank], begun, ended))
    every: list[dict[str, float]] = [{} for _ in range(RANKS)]
    dist.all_gather_object(every, medians(accounts[WARMUP_STEPS:]))
    if rank == 0:
        bound = (MICROBATCHES + RANKS - 1) / MICROBATCHES * statistics.mean(own[COMPUTES] for own in every)
        print(f"| ms | {' | '.join(f'rank {each}' for each in range(RANKS))} |\n|---|{'--:|' * RANKS}")
        print(f"| even stages, and free messages |{f' {bound:.1f} |' * RANKS}")
        for name in ROWS:
            print(f"| {name} | {' | '.join(f'{own[name]:.1f}' for own in every)} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
