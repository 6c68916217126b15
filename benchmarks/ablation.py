"""What parts of pipec gain alone, each in the case where it should gain most: with the part and without it.

    python benchmarks/ablation.py                       # every case
    python benchmarks/ablation.py direct-calls --rounds 21

A part earns its place if it gains 3% of time or 10% of memory. Each case is something that users do. The
training step of a case is compiled with the part and without it, in one process for each rank, and the two
take turns. A plan is made in a process of its own each time, the two in turns as well; imports are not timed.
The losses must have the same bits. Times are medians over rounds, and ratios are of these; bytes of steps,
statements and instructions are exact.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import gpt, next_token_loss
from optimisations import Change, replaced, without_pass
from step_time import processor_seconds
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import pipec
from pipec.cli import app
from pipec.ir import Plan, Program
from pipec.passes.precompute_weights import PrecomputeWeights

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))

from memory_meter import measure_memory

WARMUP_STEPS = 3
WITH, WITHOUT = "with", "without"
TIMED = ("clock ms", "processor ms")
"""What is measured in each round. Everything else is exact, and measured once."""

PLAN_LIMIT = 60
"""Seconds after which a plan is stopped."""

Figures = dict[str, list[float]]
"""By what was measured, the figures of all rounds."""

Training = tuple[nn.Module, dict[str, Any]]
"""A model, and what a step of it is called with."""


@dataclass(frozen=True)
class StepCase:
    """A training step, on ranks of one process or on one process each."""

    setting: str
    leave_out: Change
    make: Callable[[], Training]
    options: Mapping[str, Any]
    num_processes: int = 1
    measures_memory: bool = True


@dataclass(frozen=True)
class PlanCase:
    """A command that plans. TARGET is ``example``."""

    setting: str
    leave_out: Change
    command: str


def text(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (batch, length))


def llama(batch: int, num_layers: int, width: int, vocabulary: int) -> Training:
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_attention_heads=width // 32,
        vocab_size=vocabulary,
        max_position_embeddings=64,
    )
    tokens = text(batch, 64, vocabulary)
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens, "use_cache": False}


def narrow_gpt(batch: int, length: int, width: int = 64, num_layers: int = 8) -> Training:
    tokens = text(batch, length, 256)
    return gpt(width, 256, length, num_layers), {"x": tokens, "target": text(batch, length, 256)}


def example() -> pipec.Example:
    """16 wide layers, and a mini-batch of 16,384 rows."""
    with torch.device("meta"):
        layers = [layer for _ in range(16) for layer in (nn.Linear(1024, 1024), nn.Tanh())]
        model, x = nn.Sequential(*layers), torch.empty(16_384, 1024)
    return pipec.Example(model, (x,), target=torch.empty_like(x), loss_fn=nn.functional.mse_loss)


def no_shared_memory(transport: object, *args: object) -> None:
    """Find no rank that shares memory, so that all messages go through gloo."""


def no_kind(args: object) -> None:
    """Say of no call that it may be direct."""


def no_representatives(schedule: object) -> None:
    """Find no equal replicas."""


CASES: dict[str, StepCase | PlanCase] = {
    "precompute-weights": StepCase(
        "Llama of 8 layers, bf16-mixed, 1F1B on 4 ranks, 16 microbatches of 64 tokens",
        without_pass(PrecomputeWeights),
        functools.partial(llama, 16, 8, 256, 512),
        {"devices": 4, "schedule": "1f1b", "microbatches": 16, "precision": "bf16-mixed"},
    ),
    "shared-memory": StepCase(
        "GPT of width 64, 8 stages on 2 processes, 16 microbatches of 2 x 128 tokens",
        replaced("pipec.runtime.messages.shared_memory.SharedMemory.open", no_shared_memory),
        functools.partial(narrow_gpt, 32, 128),
        {
            "devices": 2,
            "schedule": "looped-bfs-v4",
            "stages": 8,
            "microbatches": 16,
            "loss_fn": next_token_loss,
        },
        num_processes=2,
    ),
    "direct-calls": StepCase(
        "GPT of width 64, kernels='inductor', 8 stages on 2 ranks, 16 microbatches of 32 tokens",
        replaced("pipec.runtime.stages.kernels.call_key", no_kind),
        functools.partial(narrow_gpt, 16, 32),
        {
            "devices": 2,
            "schedule": "looped-bfs-v4",
            "stages": 8,
            "microbatches": 16,
            "kernels": "inductor",
            "loss_fn": next_token_loss,
        },
        measures_memory=False,
    ),
}

ALL_REPLICAS = replaced(
    *("pipec.programs.representative_replicas.representative_replicas", no_representatives),
)
for num_ranks in (128, 512, 4096):
    CASES[f"representatives-{num_ranks}"] = PlanCase(
        f"pipec plan, 8 stages on {num_ranks} ranks, two microbatches a replica",
        ALL_REPLICAS,
        f"plan TARGET --devices {num_ranks} --stages 8 --microbatches {num_ranks // 4}",
    )


# a step


def measure_steps(case: StepCase, num_rounds: int) -> dict[str, Figures]:
    """The figures of a step with the part and without it. Every process of the case calls this."""
    torch.set_num_threads(1)
    pipes, batches = {}, {}
    figures: dict[str, Figures] = {WITH: defaultdict(list), WITHOUT: defaultdict(list)}
    losses = set[float]()
    for variant in figures:
        with variant_of(case, variant):
            torch.manual_seed(0)
            model, batch = case.make()
            pipe = pipec.compile(model, **case.options)
            inputs = [batch.pop("x")] if "x" in batch else []
            batches[variant] = functools.partial(pipe.step, *inputs, **batch)
            torch.manual_seed(1)
            losses.add(batches[variant]().item())
            figures[variant] |= exact_figures(pipe)
            if case.measures_memory:
                pipe.zero_grad()
                measured = measure_memory(pipe, *inputs, **batch)
                figures[variant]["peak bytes, measured"] = [measured.peak_bytes]
            pipes[variant] = pipe
    if len(losses) != 1:
        raise RuntimeError(f"the losses differ with the part and without it: {losses}")
    for number in range(WARMUP_STEPS + num_rounds):
        for variant, pipe in pipes.items():
            with variant_of(case, variant):
                pipe.zero_grad()
                if dist.is_initialized():
                    dist.barrier()
                start, used = time.perf_counter(), processor_seconds()
                batches[variant]()
                times = time.perf_counter() - start, over_ranks(processor_seconds() - used)
            if number >= WARMUP_STEPS:
                for what, seconds in zip(TIMED, times, strict=True):
                    figures[variant][what].append(1e3 * seconds)
    return figures


def over_ranks(seconds: float) -> float:
    """The sum over the processes of the case."""
    total = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


@contextlib.contextmanager
def variant_of(case: StepCase | PlanCase, variant: str) -> Iterator[None]:
    """Leave the part out inside a ``with``, if the variant is without it."""
    with contextlib.ExitStack() as stack:
        if variant == WITHOUT:
            case.leave_out(stack)
        yield


def exact_figures(pipe: pipec.Pipeline) -> Figures:
    """What is known of a compiled step without running it."""
    artifact = pipe._artifact
    return {
        "peak bytes, predicted": [pipe.memory().peak_bytes],
        "statements of code": [sum(" = " in line for each in artifact.sources for line in each.splitlines())],
        "instructions": [sum(len(program.instructions) for program in artifact.programs)],
    }


# a plan


def measure_plan(case: PlanCase, variant: str) -> Figures:
    """The figures of a plan that is made here, in a process of its own."""
    made: list[Program] = []

    def verify(plan: Plan, programs: Sequence[Program]) -> None:
        made.extend(programs)
        verify(plan, programs)

    words = [f"{Path(__file__)}:example" if word == "TARGET" else word for word in case.command.split()]
    start, used = time.perf_counter(), processor_seconds()
    with (
        variant_of(case, variant),
        mock.patch("pipec.compiler.staged_graph.verify", verify),
        contextlib.redirect_stdout(None),
    ):
        app(words, standalone_mode=False)
    return {
        "clock ms": [1e3 * (time.perf_counter() - start)],
        "processor ms": [1e3 * (processor_seconds() - used)],
        "peak bytes of the process": [1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss],
        "instructions": [sum(len(program.instructions) for program in made)],
    }


# both


def measure(name: str, num_rounds: int) -> dict[str, Figures]:
    """The figures of a case with the part and without it, from processes of their own."""
    case = CASES[name]
    found: dict[str, Figures] = {WITH: defaultdict(list), WITHOUT: defaultdict(list)}
    if isinstance(case, StepCase):
        return in_processes(name, "steps", num_rounds, case.num_processes) or found
    for _ in range(num_rounds):
        for variant, figures in found.items():
            made = in_processes(name, variant, 1, limit=PLAN_LIMIT)
            for what, values in (made or {"clock ms": [math.inf]}).items():
                figures[what] += values
        if math.inf in found[WITHOUT]["clock ms"]:
            break
    return found


def in_processes(
    name: str, what: str, num_rounds: int, num_processes: int = 1, limit: float | None = None
) -> Any:
    """What processes print that measure a case; None if they take longer than so many seconds."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    arguments = [name, "--measure-here", what, "--rounds", str(num_rounds)]
    command = [sys.executable, *(launcher if num_processes > 1 else []), __file__, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def rows(name: str, found: dict[str, Figures]) -> Iterator[str]:
    """The lines of a Markdown table."""
    for what, own in found[WITH].items():
        on, off = (statistics.median(each) for each in (own, found[WITHOUT][what] or [math.inf]))
        cells = (f"over {PLAN_LIMIT} s", "") if off == math.inf else (f"{off:,.0f}", f"{on / off:.3f}")
        yield f"| {name} | {what} | {on:,.0f} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"one of {', '.join(CASES)}; default: all")
    parser.add_argument("--rounds", type=int, help="default: 15 steps, 3 plans")
    parser.add_argument("--measure-here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := {*args.cases} - {*CASES}:
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(CASES)}")

    if args.measure_here:
        case = CASES[args.cases[0]]
        if isinstance(case, PlanCase):
            found: Any = measure_plan(case, args.measure_here)
        else:
            found = measure_steps(case, args.rounds)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found))
        if dist.is_initialized():
            dist.destroy_process_group()
        return

    print("| case | | with | without | with / without |\n|---|---|--:|--:|--:|")
    for name in args.cases or CASES:
        rounds = args.rounds or (3 if isinstance(CASES[name], PlanCase) else 15)
        print(f"| **{name}** | {CASES[name].setting} | | | |")
        print("\n".join(rows(name, measure(name, rounds))), flush=True)


if __name__ == "__main__":
    main()
