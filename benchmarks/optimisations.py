"""What each optimisation gains alone: a training step of a GPT with all of them, and without one at a time.

    python benchmarks/optimisations.py --cases "width 64" --rounds 9

Every variant is a process with two ranks, of one thread together, that makes the steps of ``step_time.py``.
Rounds go through all variants, and a ratio is the median over rounds of what a variant takes against what
``all`` takes in the same round: of processor time, page faults and the clock. Above 1 the optimisation gains.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from models import next_token_loss
from step_time import CASES, MICROBATCHES, RANKS, WARMUP_STEPS, Case

import pipec
from pipec.compiler import pass_list
from pipec.passes.fuse_cross_entropy import FuseCrossEntropy
from pipec.passes.make_row_sparse_gradients import MakeRowSparseGradients
from pipec.passes.merge_slice_gradients import MergeSliceGradients
from pipec.passes.precompute_weights import PrecomputeWeights
from pipec.passes.reuse_memory import ReuseMemory
from pipec.passes.simplify import Simplify

ALL = "all"

Change = Callable[[contextlib.ExitStack], dict[str, Any]]
"""Changes how pipec compiles until the stack is closed; returns arguments of ``compile``."""


def without_pass(left_out: type) -> Change:
    passes = pass_list.make_passes

    def filtered(*args: Any) -> list[Any]:
        return [each for each in passes(*args) if not isinstance(each, left_out)]

    return replaced("pipec.compiler.pass_list.make_passes", filtered)


def replaced(*pairs: Any) -> Change:
    """With other values in the place of those of these names, each followed by its replacement."""

    def change(stack: contextlib.ExitStack) -> dict[str, Any]:
        for name, value in zip(pairs[::2], pairs[1::2], strict=True):
            stack.enter_context(mock.patch(name, value))
        return {}

    return change


def nothing_in_place(function: object) -> dict[Any, Any]:
    return {}


VARIANTS: dict[str, Change] = {
    ALL: lambda stack: {},
    "without Simplify": without_pass(Simplify),
    "without MergeSliceGradients": without_pass(MergeSliceGradients),
    "without PrecomputeWeights": without_pass(PrecomputeWeights),
    "without MakeRowSparseGradients": without_pass(MakeRowSparseGradients),
    "without ReuseMemory": without_pass(ReuseMemory),
    "without FuseCrossEntropy": without_pass(FuseCrossEntropy),
    "without rows in place": replaced("pipec.graph.in_place.ROWWISE", {}),
    "without gradients of activations in place": replaced("pipec.graph.in_place.ELEMENTWISE", {}),
    "without operators in place": replaced(
        *("pipec.graph.lifetimes.in_place_operands", nothing_in_place),
        *("pipec.codegen.stage_source.in_place_operands", nothing_in_place),
    ),
    "with fused_gradients": lambda stack: {"fused_gradients": True},
}


@dataclass(frozen=True)
class Cost:
    """What a step takes, by the median of the steps, and its loss."""

    processor_seconds: float
    page_faults: float
    seconds: float
    loss: float


def measure_here(case: Case, variant: str, num_steps: int) -> Cost:
    torch.set_num_threads(1)
    tokens, target = case.batch()
    with contextlib.ExitStack() as stack:
        options = VARIANTS[variant](stack)
        pipe = pipec.compile(
            case.model(),
            devices=RANKS,
            loss_fn=next_token_loss,
            schedule="1f1b",
            microbatches=MICROBATCHES,
            recompute="none",
            **options,
        )
        loss = pipe.step(tokens, target=target).item()
    steps = []
    for _ in range(WARMUP_STEPS + num_steps):
        pipe.zero_grad()
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        pipe.step(tokens, target=target)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        steps.append((processor, after.ru_minflt - before.ru_minflt, seconds))
    return Cost(*map(statistics.median, zip(*steps[WARMUP_STEPS:], strict=True)), loss)  # type: ignore[misc]


def measure(case: str, variant: str, num_steps: int) -> Cost:
    command = [sys.executable, __file__, "--measure-here", case, variant, "--steps", str(num_steps)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{variant} failed on {case}:\n{done.stdout}{done.stderr}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def compare(case: str, variants: Sequence[str], num_rounds: int, num_steps: int) -> dict[str, list[Cost]]:
    """The costs of every variant, round by round. All must have the loss of ``all``, to the bit."""
    costs: dict[str, list[Cost]] = {variant: [] for variant in variants}
    for _, variant in (bar := pipec.progress([(k, v) for k in range(num_rounds) for v in variants], case)):
        bar.show(variant)
        costs[variant].append(measure(case, variant, num_steps))
    losses = {variant: each[0].loss for variant, each in costs.items()}
    if len({*losses.values()}) != 1:
        raise RuntimeError(f"the variants disagree on the loss of {case}: {losses}")
    return costs


def rows(case: str, costs: dict[str, list[Cost]]) -> Iterator[str]:
    """The lines of a Markdown table: what ``all`` takes, and what others take against that."""
    reference = costs[ALL]
    for variant, own in costs.items():
        if variant == ALL:
            processor, faults, seconds = (
                statistics.median(getattr(each, name) for each in own)
                for name in ("processor_seconds", "page_faults", "seconds")
            )
            yield f"| {case} | {ALL} | {1e3 * processor:.0f} ms | {faults:.0f} | {1e3 * seconds:.0f} ms |"
            continue
        pairs = list(zip(own, reference, strict=True))
        processor = statistics.median(x.processor_seconds / y.processor_seconds for x, y in pairs)
        faults = statistics.median(x.page_faults for x in own)
        seconds = statistics.median(x.seconds / y.seconds for x, y in pairs)
        yield f"| {case} | {variant} | {processor:.3f} | {faults:.0f} | {seconds:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["width 64", "width 256"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS], help="beside all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each variant in each round")
    parser.add_argument("--measure-here", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.measure_here:
        case, variant = args.measure_here
        print(json.dumps(asdict(measure_here(CASES[case], variant, args.steps))))
        return

    variants = [*dict.fromkeys([ALL, *args.variants])]
    print("| model | variant | processor time | page faults | clock |\n|---|---|--:|--:|--:|")
    for case in args.cases:
        print("\n".join(rows(case, compare(case, variants, args.rounds, args.steps))), flush=True)


if __name__ == "__main__":
    main()
