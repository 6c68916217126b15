"""What it costs to recompute and to offload: simulated on GPUs, and measured beside torch's budget.

    python benchmarks/recompute.py simulated     # 32 layers on 8 GPUs: the step by the limit
    python benchmarks/recompute.py offload       # the same with recompute, copies to the host, and both
    python benchmarks/recompute.py torch         # one stage, beside torch's activation_memory_budget

Limits are shares of what a step needs that keeps everything. ``--short`` takes a model of two narrow layers.
"""

import argparse
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from common import capture_once, gpt, medians, next_token_loss, row, table, text
from memory_meter import TensorMemoryMeter, measure_memory
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

import pipec
from pipec.capture.tracer import CaptureRequest
from pipec.compiler.candidate import Candidate
from pipec.compiler.captured_step import CapturedStep
from pipec.compiler.pass_list import CompilerOptions
from pipec.compiler.schedule_policy import make_schedule_policy
from pipec.compiler.search import search
from pipec.compiler.staged_graph import EvaluatedPlan
from pipec.errors import InfeasibleError
from pipec.graph import TrainingGraph
from pipec.hardware.devices import DEVICES
from pipec.hardware.topology import equal_devices
from pipec.ir.text_format import format_bytes, format_seconds
from pipec.passes.mark_recompute import MarkRecompute

GPU = "a100-40gb"
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.32, 0.31, 0.3)


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
        return text(self.rows, self.context, self.vocabulary)


MEASURED = Sizes(layers=8, width=128, context=128, vocabulary=512, rows=4, microbatches=1)
SIMULATED = Sizes(layers=32, width=2048, context=2048, vocabulary=32000, rows=64, microbatches=64)
SHORT = Sizes(layers=2, width=32, context=16, vocabulary=32, rows=8, microbatches=4)


# simulated


@functools.cache
def captured(sizes: Sizes) -> TrainingGraph:
    """The training graph of the model on meta."""
    kept: list[TrainingGraph] = []

    def keep(request: CaptureRequest) -> TrainingGraph:
        kept.append(capture_once(request))
        return kept[0]

    with torch.device("meta"):
        model, (tokens, target) = sizes.model(), sizes.batch()
    pipe = pipec.compile(model, 1, loss_fn=next_token_loss, microbatches=sizes.microbatches)
    with mock.patch("pipec.capture.tracer.capture", keep):
        pipe.prepare(tokens, target=target)
    return kept[0]


def best_step(
    sizes: Sizes, num_ranks: int, limit: float, recompute: str = "auto", offloads: bool = False
) -> EvaluatedPlan:
    """The best 1F1B step within a limit, as the search finds it on GPUs."""
    device = DEVICES[GPU]
    options = CompilerOptions(device, equal_devices(num_ranks, device.link, limit), recompute, offloads)
    candidate = Candidate(make_schedule_policy("1f1b", num_ranks), options, sizes.microbatches)
    return search(CapturedStep(captured(sizes), sizes.rows), candidate).best


def full_step(free: EvaluatedPlan) -> EvaluatedPlan:
    """The step that recomputes everything, on the cut of the step without a limit."""
    values = free.staged.forward_values(free.plan.microbatch_size)
    everything = frozenset(name for stage in values for name in stage)
    return free.staged.with_recompute(MarkRecompute(everything)).evaluate(
        free.schedule, free.plan.microbatch_size
    )


def simulated(sizes: Sizes, num_ranks: int, shares: Sequence[float]) -> Iterator[str]:
    """The step by its peak memory, for limits that fall until nothing fits."""
    free = best_step(sizes, num_ranks, math.inf)
    full = full_step(free)
    limits = {f"auto, {share:.0%}": share * free.peak_bytes for share in shares}
    found = {"none": free}
    for name, limit in {**limits, "auto, as much as full": full.peak_bytes}.items():
        step = best_step(sizes, num_ranks, limit)
        if not any(step.excess_bytes):
            found[name] = step
    yield from table("recompute", "peak of all ranks", "step", "of none", "replays, by stage")
    for name, step in {**found, "full": full}.items():
        stages = ", ".join(_replayed_share(step, stage) for stage in range(num_ranks))
        relative = f"{step.seconds / free.seconds:.3f}"
        yield row(name, format_bytes(step.peak_bytes), format_seconds(step.seconds), relative, stages)


def _replayed_share(evaluated: EvaluatedPlan, stage: int) -> str:
    """How much of its forward a stage replays, in seconds."""
    values = evaluated.staged.forward_values(evaluated.plan.microbatch_size)[stage]
    again = {node.name for node in evaluated.staged.graph.nodes if node.meta.get("recompute")}
    total = sum(value.seconds for value in values.values())
    return f"{sum(value.seconds for name, value in values.items() if name in again) / total:.0%}"


WAYS = {"recompute": ("auto", False), "copies": ("none", True), "both": ("auto", True)}


def offload(sizes: Sizes, num_ranks: int, shares: Sequence[float]) -> Iterator[str]:
    """The step within limits by recompute alone, by copies to the host alone, and by both."""
    most = best_step(sizes, num_ranks, math.inf).peak_bytes
    yield from table("limit, of what is kept without", *WAYS, "on the host of a rank, with both")
    for share in shares:
        steps = {way: best_step(sizes, num_ranks, share * most, *how) for way, how in WAYS.items()}
        cells = ("" if any(step.excess_bytes) else format_seconds(step.seconds) for step in steps.values())
        host = max(need.host_bytes for need in steps["both"].memory)
        yield row(f"{share:.0%}", *cells, format_bytes(host))


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


def against_torch(sizes: Sizes, rounds: int) -> Iterator[str]:
    """One stage and one microbatch: pipec is given what torch's choice really takes for each budget."""
    tokens, target = sizes.batch()
    yield from table(
        "torch's budget", "torch, peak", "torch, ms", "pipec, peak", "pipec, ms", "pipec / torch"
    )
    for budget in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0):
        step, parameters = torchs_step(sizes, budget)
        peak = peak_of(step, parameters)
        try:
            options = {"loss_fn": next_token_loss, "microbatches": 1, "memory_limit": int(peak)}
            pipe = pipec.compile(sizes.model(), 1, **options).prepare(tokens, target=target)
        except InfeasibleError:
            yield row(budget, format_bytes(peak), "", "more", "", "")
            continue
        own = measure_memory(pipe, tokens, target=target).peak_bytes
        taken = medians({"torch": step, "pipec": functools.partial(pipe.step, tokens, target=target)}, rounds)
        theirs, ours = taken["torch"], taken["pipec"]
        shown = f"{1e3 * theirs:.1f}", format_bytes(own), f"{1e3 * ours:.1f}", f"{ours / theirs:.2f}"
        yield row(budget, format_bytes(peak), *shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["simulated", "offload", "torch"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--short", action="store_true", help="a model of two narrow layers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    here, there = (SHORT, SHORT) if args.short else (MEASURED, SIMULATED)
    parts = {
        "simulated": lambda: simulated(there, args.ranks, args.shares),
        "offload": lambda: offload(there, args.ranks, args.shares),
        "torch": lambda: against_torch(here, args.rounds),
    }
    for line in parts[args.part]():
        print(line, flush=True)


if __name__ == "__main__":
    main()
