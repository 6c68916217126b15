"""What replaying costs and saves: measured in one process, simulated on eight GPUs, against torch's budget.

    python benchmarks/recompute.py measured      # two ranks of one process: seconds and bytes of a step
    python benchmarks/recompute.py torch         # one stage, against torch's activation_memory_budget
    python benchmarks/recompute.py simulated     # 32 layers on 8 GPUs; --picture docs/images/recompute.svg
    python benchmarks/recompute.py solver        # how long choosing takes for 12 and 96 layers

Limits are shares of what a step needs that keeps everything.
"""

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import scipy
import torch
from models import gpt, next_token_loss
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from transformers import GPT2Config, GPT2LMHeadModel

import pipec
from pipec.capture.tracer import CaptureRequest, capture
from pipec.compiler.candidate import Candidate
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.schedule_policy import make_schedule_policy
from pipec.compiler.search import CapturedStep, search
from pipec.compiler.staged_graph import EvaluatedPlan
from pipec.errors import InfeasibleError
from pipec.graph import TrainingGraph
from pipec.hardware.devices import DEVICES
from pipec.hardware.topology import equal_devices
from pipec.ir.text_format import format_bytes, format_seconds
from pipec.passes.mark_recompute import MarkRecompute

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))

from memory_meter import TensorMemoryMeter, measure_memory

GPU = "a100-40gb"
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.32, 0.31, 0.3)


def table(*headings: str) -> Callable[..., None]:
    """Print the head of a table; returns what prints a row."""
    print("| " + " | ".join(headings) + " |")
    print("|" + "--:|" * len(headings), flush=True)
    return lambda *cells: print("| " + " | ".join(map(str, cells)) + " |", flush=True)


# measured


@dataclass(frozen=True)
class Sizes:
    """A GPT and a batch for it."""

    layers: int
    width: int
    context: int
    vocabulary: int
    rows: int
    microbatches: int

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return gpt(self.width, self.vocabulary, self.context, self.layers)

    def batch(self) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(self.vocabulary, (self.rows, self.context + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


MEASURED = Sizes(layers=8, width=128, context=128, vocabulary=512, rows=32, microbatches=8)
SIMULATED = Sizes(layers=32, width=2048, context=2048, vocabulary=32000, rows=64, microbatches=64)
SHORT = Sizes(layers=2, width=32, context=16, vocabulary=32, rows=8, microbatches=4)


def prepared(sizes: Sizes, num_devices: int, **options: object) -> pipec.Pipeline:
    tokens, target = sizes.batch()
    pipe = pipec.compile(
        sizes.model(),
        num_devices,
        loss_fn=next_token_loss,
        microbatches=sizes.microbatches,
        **options,  # type: ignore[arg-type]
    )
    return pipe.prepare(tokens, target=target)


def seconds_of(steps: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each. They take turns, so that a slow minute of the machine slows all of them."""
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds + 1):
        for step, taken in zip(steps, seconds, strict=True):
            started = time.perf_counter()
            step()
            taken.append(time.perf_counter() - started)
    return [statistics.median(taken[1:]) for taken in seconds]


def measured(sizes: Sizes, rounds: int, shares: Sequence[float]) -> None:
    """Two ranks of one process: all, nothing, and budgets between."""
    tokens, target = sizes.batch()
    pipes = {each: prepared(sizes, 2, recompute=each) for each in ("none", "full")}
    most = pipes["none"].memory().peak_bytes
    for share in shares:
        try:
            pipes[f"auto, {share:.0%}"] = prepared(sizes, 2, memory_limit=int(share * most))
        except InfeasibleError:
            break
    row = table("recompute", "limit", "predicted", "measured", "step ms", "of none")
    for pipe in pipes.values():
        pipe.step(tokens, target=target)
        pipe.zero_grad()
    held = [measure_memory(pipe, tokens, target=target).peak_bytes for pipe in pipes.values()]
    steps = [functools.partial(pipe.step, tokens, target=target) for pipe in pipes.values()]
    seconds = seconds_of(steps, rounds)
    for (name, pipe), peak, taken in zip(pipes.items(), held, seconds, strict=True):
        limit = format_bytes(float(name.split()[1][:-1]) / 100 * most) if "%" in name else ""
        predicted = format_bytes(pipe.memory().peak_bytes)
        row(name, limit, predicted, format_bytes(peak), f"{1e3 * taken:.1f}", f"{taken / seconds[0]:.3f}")


# against torch's own budget


class WithLoss(nn.Module):
    """A model whose output is its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        return next_token_loss(self.model(tokens), target)


def torchs_step(sizes: Sizes, budget: float) -> tuple[Callable[[], None], list[Tensor]]:
    """A step of what torch's partitioner makes for a budget, run operator by operator; and its parameters.

    The step has been made once, and its gradients are set to None.
    """
    tokens, target = sizes.batch()

    def as_it_is(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        return make_boxed_func(graph.forward)

    module = WithLoss(sizes.model())
    compiled = aot_module(module, as_it_is, partition_fn=min_cut_rematerialization_partition)

    def step() -> None:
        with functorch_config.patch(activation_memory_budget=budget):
            compiled(tokens, target).backward()

    step()
    module.zero_grad()
    return step, list(module.parameters())


def peak_of(step: Callable[[], None], parameters: Sequence[Tensor]) -> float:
    with TensorMemoryMeter() as meter:
        meter.begin({"parameters": parameters})
        step()
        meter.note()
        return meter.memory(0).peak_bytes


def against_torch(sizes: Sizes, rounds: int) -> None:
    """One stage and one microbatch: pipec is given what torch's choice really takes for each budget."""
    one = replace(sizes, microbatches=1, rows=max(1, sizes.rows // sizes.microbatches))
    tokens, target = one.batch()
    row = table("torch's budget", "torch, peak", "torch, ms", "pipec, peak", "pipec, ms", "pipec / torch")
    for budget in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0):
        step, parameters = torchs_step(one, budget)
        peak = peak_of(step, parameters)
        try:
            pipe = prepared(one, 1, memory_limit=int(peak))
        except InfeasibleError:
            row(budget, format_bytes(peak), "", "more", "", "")
            continue
        own = measure_memory(pipe, tokens, target=target).peak_bytes
        theirs, ours = seconds_of([step, functools.partial(pipe.step, tokens, target=target)], rounds)
        shown = f"{1e3 * theirs:.1f}", format_bytes(own), f"{1e3 * ours:.1f}", f"{ours / theirs:.2f}"
        row(budget, format_bytes(peak), *shown)


# simulated


@functools.cache
def captured(sizes: Sizes) -> TrainingGraph:
    """The training graph of the model on meta."""
    kept: list[TrainingGraph] = []

    def keep(request: CaptureRequest) -> TrainingGraph:
        kept.append(capture(request))
        return kept[0]

    with torch.device("meta"):
        model, (tokens, target) = sizes.model(), sizes.batch()
    pipe = pipec.compile(model, 1, loss_fn=next_token_loss, microbatches=sizes.microbatches, dynamic=False)
    with mock.patch("pipec.compiler.compile.capture", keep):
        pipe.prepare(tokens, target=target)
    return kept[0]


def simulated_step(sizes: Sizes, num_ranks: int, limit: float) -> EvaluatedPlan:
    """The best 1F1B step within a limit, as the search finds it on GPUs."""
    device = DEVICES[GPU]
    topology = equal_devices(num_ranks, device.link, limit)
    options = CompilerOptions(device, topology)
    policy = make_schedule_policy("1f1b", num_ranks)
    candidate = Candidate(policy, options, sizes.microbatches)
    return search(CapturedStep(captured(sizes), sizes.rows), candidate).best


def full_step(sizes: Sizes, num_ranks: int) -> EvaluatedPlan:
    """Everything is recomputed, on the cut that does not know of it."""
    free = simulated_step(sizes, num_ranks, math.inf)
    values = free.staged.forward_values(free.plan.microbatch_size)
    everything = frozenset(name for stage in values for name in stage)
    return free.staged.with_recompute(MarkRecompute(everything)).evaluate(
        free.schedule, free.plan.microbatch_size
    )


def budgets(sizes: Sizes, num_ranks: int, shares: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Shares of what a step needs that keeps everything, and the limits that these are."""
    most = simulated_step(sizes, num_ranks, math.inf).peak_bytes
    for share in shares:
        yield share, share * most


def simulated(sizes: Sizes, num_ranks: int, shares: Sequence[float], picture: Path | None) -> None:
    """The step against its peak memory, for limits that fall until nothing fits."""
    free, full = simulated_step(sizes, num_ranks, math.inf), full_step(sizes, num_ranks)
    row = table("recompute", "peak of all ranks", "step", "of none", "replays, by stage")
    row("none", format_bytes(free.peak_bytes), format_seconds(free.seconds), "1.000", "")
    points = []
    for share, limit in [*budgets(sizes, num_ranks, shares), (0.0, full.peak_bytes)]:
        evaluated = simulated_step(sizes, num_ranks, limit)
        if any(evaluated.excess_bytes):
            continue
        stages = ", ".join(_replayed_share(evaluated, stage) for stage in range(num_ranks))
        name = f"auto, {share:.0%}" if share else "auto, as much as full"
        relative = evaluated.seconds / free.seconds
        row(
            name,
            format_bytes(evaluated.peak_bytes),
            format_seconds(evaluated.seconds),
            f"{relative:.3f}",
            stages,
        )
        points.append((evaluated.peak_bytes, relative))
    relative = full.seconds / free.seconds
    row("full", format_bytes(full.peak_bytes), format_seconds(full.seconds), f"{relative:.3f}", "100% each")
    if picture:
        picture.write_text(
            drawn([(free.peak_bytes, 1.0), *sorted(points, reverse=True)], (full.peak_bytes, relative))
        )


def _replayed_share(evaluated: EvaluatedPlan, stage: int) -> str:
    """How much of its forward a stage replays, in seconds."""
    values = evaluated.staged.forward_values(evaluated.plan.microbatch_size)[stage]
    again = {node.name for node in evaluated.staged.graph.nodes if node.meta.get("recompute")}
    total = sum(value.seconds for value in values.values())
    return f"{sum(value.seconds for name, value in values.items() if name in again) / total:.0%}"


# the solver


def solver(all_layers: Sequence[int], num_ranks: int) -> None:
    """How long choosing takes in a whole compilation of GPT-2, in seconds of the processor.

    The batch is symbolic, and ranks have half the memory that keeps everything.
    """
    row = table("layers", "ranks", "problems", "slowest", "all problems", "whole compilation", "share")
    for layers in all_layers:
        most = gpt2(layers, num_ranks, recompute="none").memory().peak_bytes
        taken: list[float] = []
        started = time.process_time()
        with timed(taken):
            gpt2(layers, num_ranks, memory_limit=most // 2)
        whole = time.process_time() - started
        shown = map(format_seconds, (max(taken), sum(taken), whole))
        row(layers, num_ranks, len(taken), *shown, f"{sum(taken) / whole:.2%}")


def gpt2(layers: int, num_ranks: int, **options: Any) -> pipec.Pipeline:
    """GPT-2, small but for its depth, compiled on meta."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers))
        tokens = torch.ones(2 * num_ranks, 1024, dtype=torch.int64)
    pipe = pipec.compile(model, num_ranks, microbatches=2 * num_ranks, **options)
    return pipe.prepare(input_ids=tokens, labels=tokens)


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Note the processor's seconds for each program that is solved inside a ``with``."""

    def noted(solve: Callable[..., object], *args: object, **options: object) -> object:
        started = time.process_time()
        try:
            return solve(*args, **options)
        finally:
            seconds.append(time.process_time() - started)

    with mock.patch.object(scipy.optimize, "milp", functools.partial(noted, scipy.optimize.milp)):
        yield


# the picture


def drawn(points: Sequence[tuple[float, float]], full: tuple[float, float]) -> str:
    """Step time over peak memory as SVG: what budgets give, and what replaying everything does."""
    left, top, width, height = 70, 20, 520, 300
    most, slowest = max(x for x, _ in points), max(y for _, y in [*points, full])

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = point
        return left + width * x / most, top + height * (slowest - y) / (slowest - 1.0 or 1.0)

    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, points))
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in map(place, points))
    x, y = place(full)
    marks = "".join(
        f'<text x="{left + width * share:.0f}" y="{top + height + 18}" text-anchor="middle">'
        f"{format_bytes(share * most)}</text>"
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    steps = "".join(
        f'<text x="{left - 8}" y="{top + height * (1 - share) + 4:.0f}" text-anchor="end">'
        f"{1 + share * (slowest - 1):.2f}</text>"
        for share in (0.0, 0.5, 1.0)
    )
    axis = "peak memory of the rank that needs most"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="640" height="380" font-family="sans-serif"
 font-size="12">
<rect width="640" height="380" fill="white"/>
<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="#888"/>
{marks}{steps}
<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">{axis}</text>
<text x="16" y="{top - 6}">step time over that without recompute</text>
<polyline points="{path}" fill="none" stroke="#3b6fb6" stroke-width="2"/><g fill="#3b6fb6">{dots}</g>
<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="#c0504d"/>
<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="#c0504d">recompute="full"</text>
</svg>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["measured", "torch", "simulated", "solver"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 96], help="of solver")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--short", action="store_true", help="a model of two narrow layers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    here, there = (SHORT, SHORT) if args.short else (MEASURED, SIMULATED)
    layers = (2,) if args.short else tuple(args.layers)
    parts: dict[str, Callable[[], None]] = {
        "measured": lambda: measured(here, args.rounds, args.shares),
        "torch": lambda: against_torch(here, args.rounds),
        "simulated": lambda: simulated(there, args.ranks, args.shares, args.picture),
        "solver": lambda: solver(layers, args.ranks),
    }
    parts[args.part]()


if __name__ == "__main__":
    main()
