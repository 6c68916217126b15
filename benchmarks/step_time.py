"""Step time of one model on two ranks of one thread each: unsplit, pipec, and torch.distributed.pipelining.

    python benchmarks/step_time.py --cases "width 64" --modes plain

A step is the forward and backward of a mini-batch of 8 microbatches, with the zeroing of gradients and
without the optimizer. The 1F1B bound is the unsplit time times (m + p - 1) / (m p), for m microbatches and p
ranks: perfectly balanced stages, free communication.

Four modes, each with contestants of its own: "plain" and "compiled", where both sides run 1F1B, without and
with torch.compile; "outside", where the script computes the loss of the outputs, which the last stage does
otherwise; and "planned", where the peer's runtime follows the orders and the cut that
`pipec plan -o order.csv` writes, beside its own schedules on the stages that torchtitan makes.

Each round starts fresh processes. In "planned" all contestants take turns step by step in the same two,
because uneven stages gain if other programs use a core meanwhile; ratios are then of the steps of a turn.
Elsewhere each contestant runs alone. Besides the clock, a row has the processor time of a step on the busiest
rank, and how many cores other programs used.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import gpt, in_processes, next_token_loss, processor_seconds, resnet50, row, table, text
from torch import Tensor, nn
from torch.distributed import pipelining

import pipec
from pipec.ir import stages_on
from pipec.pipeline.pipeline_module import OutputsOption
from pipec.schedules import parse_orders

MICROBATCHES, RANKS = 8, 2
BATCH, CONTEXT = 16, 128
WARMUP_STEPS = 3
BOUND = (MICROBATCHES + RANKS - 1) / (MICROBATCHES * RANKS)
PEER = "torch.distributed.pipelining"

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, a mini-batch for it, and the child with which the peer's second stage begins."""

    name: str
    make_model: Callable[[], nn.Sequential]
    make_batch: Callable[[], Batch]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    second_stage: int

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return self.make_model()

    def batch(self) -> Batch:
        """The inputs and the targets, with ``BATCH`` rows each."""
        torch.manual_seed(0)
        return self.make_batch()


def images() -> Batch:
    """``f32[batch, 3, 224, 224]`` images, and the number of a class for each."""
    return torch.randn(BATCH, 3, 224, 224), torch.randint(1000, (BATCH,))


TORCHTITAN = {2: (5,), 4: (3, 6, 8)}
"""The children with which later stages begin there: embedding and output layer count as a block each."""


def gpt_case(name: str, width: int, vocabulary: int) -> Case:
    """An 8-layer GPT. Its stages have equal layers, the first one the embedding, the last one the output."""
    model = partial(gpt, width, vocabulary, CONTEXT)
    return Case(name, model, partial(text, BATCH, CONTEXT, vocabulary), next_token_loss, second_stage=5)


CASES = {
    case.name: case
    for case in (
        gpt_case("width 64", 64, 256),
        gpt_case("width 256", 256, 256),
        gpt_case("32k vocabulary", 256, 32768),
        Case("ResNet-50, half as wide", partial(resnet50, 0.5), images, F.cross_entropy, second_stage=8),
    )
}

Step = Callable[[], Tensor | None]
"""Runs one step; returns the mini-batch loss on the ranks that know it."""


def unsplit_step(case: Case, compiled: bool = False) -> Step:
    model, batch = case.model(), case.batch()
    run = torch.compile(model) if compiled else model
    microbatches = list(zip(*(tensor.chunk(MICROBATCHES) for tensor in batch), strict=True))

    def step() -> Tensor:
        model.zero_grad()
        total = torch.zeros(())
        for inputs, target in microbatches:
            loss = case.loss_fn(run(inputs), target) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        return total

    return step


def pipeline(case: Case, schedule: str = "1f1b", **options: Any) -> pipec.Pipeline:
    options = {"loss_fn": case.loss_fn, "microbatches": MICROBATCHES, "recompute": "none", **options}
    return pipec.compile(case.model(), devices=RANKS, schedule=schedule, **options)


def outside_step(case: Case, outputs: OutputsOption, **options: Any) -> Step:
    """The step of a loop that computes the loss of the pipeline's outputs."""
    module, (inputs, target) = pipeline(case, loss_fn=None, **options).as_module(outputs), case.batch()

    def step() -> Tensor:
        module.zero_grad()
        loss = case.loss_fn(module(inputs), target)
        loss.backward()
        return loss.detach()

    return step


def pipec_step(case: Case, schedule: str = "1f1b", **options: Any) -> Step:
    pipe, (inputs, target) = pipeline(case, schedule, **options), case.batch()

    def step() -> Tensor:
        pipe.zero_grad()
        return pipe.step(inputs, target=target)

    return step


@dataclass(frozen=True)
class PeerSchedule:
    """A schedule of the peer, and the stages of each rank."""

    make: Callable[..., pipelining.schedules._PipelineSchedule]
    stages: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        return sum(map(len, self.stages))


ONE_F_ONE_B = PeerSchedule(pipelining.Schedule1F1B, ((0,), (1,)))
TORCHS_SCHEDULES = {
    "GPipe": PeerSchedule(pipelining.ScheduleGPipe, ((0,), (1,))),
    "1F1B": ONE_F_ONE_B,
    "interleaved 1F1B": PeerSchedule(pipelining.ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "interleaved zero bubble": PeerSchedule(pipelining.ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "ZBV": PeerSchedule(pipelining.ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
}


def join_peers() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def peer_step(case: Case, compiled: bool = False) -> Step:
    return peer_step_on(case, ONE_F_ONE_B, (case.second_stage,), compiled)


def peer_step_on(case: Case, schedule: PeerSchedule, starts: Sequence[int], compiled: bool = False) -> Step:
    """A step of the peer on stages that begin with the first child, and with those at ``starts``."""
    join_peers()
    model = case.model()
    parts = [model[start:end] for start, end in itertools.pairwise((0, *starts, None))]
    own = {number: parts[number] for number in schedule.stages[dist.get_rank()]}
    return _peer_step(case, schedule.make, own, len(parts), compiled)


def planned_peer_step(case: Case, schedule: str) -> Step:
    """The peer's runtime with the orders and the modules of each stage that ``pipec plan`` writes."""
    join_peers()
    planned: list[Any] = [write_plan(case, schedule) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(planned)
    (orders, modules), model = planned[0], case.model()
    placement = parse_orders(orders, schedule).placement
    own = {
        number: nn.Sequential(*map(model.get_submodule, modules[number]))
        for number in stages_on(placement, dist.get_rank())
    }

    def make(stages: Any, *args: Any, **kwargs: Any) -> pipelining.schedules._PipelineSchedule:
        run = pipelining.schedules._PipelineScheduleRuntime(stages, *args, **kwargs)
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(orders)
            file.flush()
            run._load_csv(file.name)
        return run

    return _peer_step(case, make, own, len(modules))


def _peer_step(
    case: Case,
    make: Callable[..., pipelining.schedules._PipelineSchedule],
    parts: dict[int, nn.Sequential],
    num_stages: int,
    compiled: bool = False,
) -> Step:
    """A step of the peer, on a rank that has these stages."""
    stages = [
        pipelining.PipelineStage(
            torch.compile(part) if compiled else part, number, num_stages, torch.device("cpu")
        )
        for number, part in parts.items()
    ]
    is_single = isinstance(make, type) and issubclass(make, pipelining.schedules.PipelineScheduleSingle)
    run = make(stages[0] if is_single else stages, MICROBATCHES, loss_fn=case.loss_fn)
    inputs, target = case.batch()
    arguments = (inputs,) if 0 in parts else ()
    is_last = num_stages - 1 in parts

    def step() -> Tensor | None:
        for part in parts.values():
            part.zero_grad()
        losses: list[Tensor] = []
        targets = {"target": target, "losses": losses} if is_last else {}
        run.step(*arguments, **targets, return_outputs=False)
        return torch.stack(losses).mean() if is_last else None

    return step


def write_plan(case: Case, schedule: str) -> tuple[str, list[list[str]]]:
    """The orders and the modules of each stage that ``pipec plan`` writes, as a user calls it."""
    alone = {name: x for name, x in os.environ.items() if "RANK" not in name and "WORLD" not in name}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.csv"
        options = ["--devices", RANKS, "--microbatches", MICROBATCHES, "--schedule", schedule, "-o", path]
        command = [sys.executable, "-m", "pipec", "plan", f"{__file__}:planned", *map(str, options)]
        subprocess.run(command, env={**alone, "PLANNED": case.name}, check=True, capture_output=True)
        return path.read_text(), json.loads(path.with_suffix(".modules.json").read_text())


def planned() -> pipec.Example:
    """What ``write_plan`` plans."""
    case = CASES[os.environ["PLANNED"]]
    inputs, target = case.batch()
    return pipec.Example(case.model(), (inputs,), target=target, loss_fn=case.loss_fn)


@dataclass(frozen=True)
class Contestant:
    """How to make a step function, and in how many processes it runs."""

    make_step: Callable[[Case], Step]
    num_processes: int = RANKS


UNSPLIT, COMPILED = "unsplit", "unsplit, torch.compile"
MODES = {
    "plain": {
        UNSPLIT: Contestant(unsplit_step, 1),
        "pipec": Contestant(pipec_step),
        PEER: Contestant(peer_step),
    },
    "compiled": {
        COMPILED: Contestant(partial(unsplit_step, compiled=True), 1),
        "pipec, inductor": Contestant(partial(pipec_step, kernels="inductor")),
        f"{PEER}, torch.compile": Contestant(partial(peer_step, compiled=True)),
    },
    "outside": {
        "pipec, loss inside": Contestant(partial(pipec_step, schedule="gpipe")),
        "pipec, loss outside": Contestant(partial(outside_step, outputs="differentiable", schedule="gpipe")),
        "pipec, loss on the last stage": Contestant(partial(outside_step, outputs="last", schedule="gpipe")),
    },
    "planned": {
        **{
            f"{PEER}, {name}": Contestant(
                partial(peer_step_on, schedule=each, starts=TORCHTITAN[each.num_stages])
            )
            for name, each in TORCHS_SCHEDULES.items()
        },
        **{
            f"orders and cut of pipec, {schedule}": Contestant(partial(planned_peer_step, schedule=schedule))
            for schedule in ("1f1b", "zb-v", "auto")
        },
    },
}


class Sample(NamedTuple):
    """Seconds of a step on one rank: by the clock, and of the processor for this process and for all."""

    clock: float
    processor: float
    busy: float


Times = list[tuple[Sample, ...]]
"""For each step, a sample of each rank. The clock counts on rank 0, where the last backward ends."""


def busy_seconds() -> float:
    """Seconds for which the cores of this machine were not idle."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def measure_here(mode: str, case: Case, folder: Path, contestants: Sequence[str], num_steps: int) -> None:
    """In a process of these contestants, which take turns: leave samples and first losses in ``folder``."""
    torch.set_num_threads(1)
    steps = {name: MODES[mode][name].make_step(case) for name in contestants}
    losses = {name: step() for name, step in steps.items()}
    found: dict[str, list[Sample]] = {name: [] for name in steps}
    for _, (name, step) in itertools.product(range(WARMUP_STEPS + num_steps), steps.items()):
        meet()
        start, used, busy = time.perf_counter(), processor_seconds(), busy_seconds()
        step()
        seconds = time.perf_counter() - start
        meet()
        found[name].append(Sample(seconds, processor_seconds() - used, busy_seconds() - busy))
    timed = {name: samples[WARMUP_STEPS:] for name, samples in found.items()}
    known = {name: loss.item() for name, loss in losses.items() if loss is not None}
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps([timed, known]))
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(
    mode: str, case: Case, contestants: Sequence[str], num_steps: int
) -> tuple[Any, dict[str, float]]:
    """The times and the first loss of each of these contestants, in fresh processes."""
    num_processes = MODES[mode][contestants[0]].num_processes
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--here", mode, case.name, folder, *contestants, "--steps", str(num_steps)]
        in_processes(__file__, num_processes, arguments)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_processes)]
    times = {
        name: [
            tuple(Sample(*each) for each in step) for step in zip(*(r[0][name] for r in ranks), strict=True)
        ]
        for name in contestants
    }
    return times, {name: loss for _, known in ranks for name, loss in known.items()}


def compare(mode: str, case: Case, num_rounds: int, num_steps: int) -> dict[str, Times]:
    """Times of every step by contestant, over rounds; all must agree on the loss."""
    names = [*MODES[mode]]
    together = [names] if mode == "planned" else [[name] for name in names]
    times: dict[str, Times] = {name: [] for name in names}
    losses: dict[str, float] = {}
    for _, group in itertools.product(range(num_rounds), together):
        measured, known = measure(mode, case, group, num_steps)
        losses |= known
        for name in group:
            times[name] += measured[name]
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise RuntimeError(f"the contestants disagree on the loss of {case.name}: {losses}")
    return times


def lines(case: str, mode: str, times: dict[str, Times]) -> Iterator[str]:
    """A line of the table for each contestant, compared with the fastest peer and with the bound."""
    clocks = {name: [first.clock for first, *_ in steps] for name, steps in times.items()}
    medians = {name: statistics.median(seconds) for name, seconds in clocks.items()}
    busiest = {
        name: max(statistics.median(each.processor for each in rank) for rank in zip(*steps, strict=True))
        for name, steps in times.items()
    }
    peer = min((name for name in times if name.startswith(PEER)), key=medians.__getitem__, default=None)
    bound = next((BOUND * medians[name] for name in (UNSPLIT, COMPILED) if name in times), None)
    for name, steps in times.items():
        spread = f"{1e3 * min(clocks[name]):.0f} to {1e3 * max(clocks[name]):.0f}"
        ratios = [medians[name] / medians[peer or name]]
        if mode == "planned":
            ratios = [one / other for one, other in zip(clocks[name], clocks[peer or name], strict=True)]
        others = statistics.median(
            (step[0].busy - sum(each.processor for each in step)) / step[0].clock for step in steps
        )
        yield row(
            *(case, mode, name, f"{1e3 * medians[name]:.0f}", spread),
            *(
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else "",
            ),
            f"{medians[name] / bound:.2f}" if bound else "",
            *(f"{1e3 * busiest[name]:.0f}", f"{others:.1f}"),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each contestant in each round")
    parser.add_argument("--here", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.here:
        mode, name, folder, *contestants = args.here
        measure_here(mode, CASES[name], Path(folder), contestants, args.steps)
        return

    headings = (
        "median ms",
        "min to max",
        "/ peer",
        "of steps",
        "/ bound",
        "busiest rank's ms",
        "other cores",
    )
    print("\n".join(table("model", "mode", "contestant", *headings, numbers_from=3)), flush=True)
    for case, mode in itertools.product(args.cases, args.modes):
        times = compare(mode, CASES[case], args.rounds, args.steps)
        print("\n".join(lines(case, mode, times)), flush=True)
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    print(f"\n{machine}; {RANKS} ranks of 1 thread, {MICROBATCHES} microbatches")


if __name__ == "__main__":
    main()
