"""Step time of one model on two ranks of one thread each: unsplit, pipec, and torch.distributed.pipelining.

    python benchmarks/step_time.py --cases "width 64" --modes plain

A step is the forward and backward of a mini-batch of 8 microbatches, with the zeroing of gradients and
without the optimizer. Every contestant runs alone in fresh processes; rounds alternate between the
contestants, so that a change in the machine's speed meets all of them. The 1F1B bound is the unsplit time
times (m + p - 1) / (m p), for m microbatches and p ranks: perfectly balanced stages, free communication.

Four modes, each with contestants of its own: "plain" and "compiled", where both sides run 1F1B, without and
with torch.compile; "best", where pipec chooses its schedule and the peer is its fastest schedule; and
"outside", where the script computes the loss of the outputs, which the last stage does otherwise. Besides the
clock, a row has the processor time of a step, summed over ranks and threads.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import gpt, in_processes, next_token_loss, processor_seconds, resnet50, row, table
from torch import Tensor, nn
from torch.distributed import pipelining

import pipec

MICROBATCHES, RANKS = 8, 2
BATCH, CONTEXT = 16, 128
WARMUP_STEPS = 3
BOUND = (MICROBATCHES + RANKS - 1) / (MICROBATCHES * RANKS)
PEER = "torch.distributed.pipelining"

Batch = tuple[Tensor, Tensor]
Cuts = dict[int, tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    """A model, a mini-batch for it, and how the peer's stages are cut by hand.

    ``cuts`` has for each number of stages the children of the model with which the stages after the first one
    begin.
    """

    name: str
    make_model: Callable[[], nn.Sequential]
    make_batch: Callable[[], Batch]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    cuts: Cuts

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return self.make_model()

    def batch(self) -> Batch:
        """The inputs and the targets, with ``BATCH`` rows each."""
        torch.manual_seed(0)
        return self.make_batch()

    def stages(self, num_stages: int) -> list[nn.Sequential]:
        model, edges = self.model(), (0, *self.cuts[num_stages], None)
        return [model[start:end] for start, end in itertools.pairwise(edges)]


def text(vocabulary: int) -> Batch:
    """``int64[batch, context]`` tokens, and the tokens that follow them."""
    tokens = torch.randint(vocabulary, (BATCH, CONTEXT + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def images() -> Batch:
    """``f32[batch, 3, 224, 224]`` images, and the number of a class for each."""
    return torch.randn(BATCH, 3, 224, 224), torch.randint(1000, (BATCH,))


EQUAL_LAYERS: Cuts = {2: (5,), 4: (3, 5, 7)}
EQUAL_FLOPS: Cuts = {2: (8,), 4: (3, 8, 13)}


def gpt_case(name: str, width: int, vocabulary: int) -> Case:
    """An 8-layer GPT. Its stages have equal layers, the first one the embedding, the last one the output."""
    model = partial(gpt, width, vocabulary, CONTEXT)
    return Case(name, model, partial(text, vocabulary), next_token_loss, EQUAL_LAYERS)


CASES = {
    case.name: case
    for case in (
        gpt_case("width 64", 64, 256),
        gpt_case("width 256", 256, 256),
        gpt_case("32k vocabulary", 256, 32768),
        Case("ResNet-50, half as wide", partial(resnet50, 0.5), images, F.cross_entropy, EQUAL_FLOPS),
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


def module_step(case: Case, *, outside: bool = False, **options: Any) -> Step:
    """The step of a loop that calls the model and ``loss.backward()``; it computes a loss that is outside."""
    options = {"loss_fn": None} | options if outside else options
    module, (inputs, target) = pipeline(case, **options).as_module(), case.batch()

    def step() -> Tensor:
        module.zero_grad()
        loss: Tensor = case.loss_fn(module(inputs), target) if outside else module(inputs, target=target)
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


ONE_EACH = ((0,), (1,))
ROUND_ROBIN = ((0, 2), (1, 3))
THERE_AND_BACK = ((0, 3), (1, 2))
ONE_F_ONE_B = PeerSchedule(pipelining.Schedule1F1B, ONE_EACH)


def peer_step(case: Case, schedule: PeerSchedule = ONE_F_ONE_B, compiled: bool = False) -> Step:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parts = {number: case.stages(schedule.num_stages)[number] for number in schedule.stages[rank]}
    stages = [
        pipelining.PipelineStage(
            torch.compile(part) if compiled else part, number, schedule.num_stages, torch.device("cpu")
        )
        for number, part in parts.items()
    ]
    given = stages[0] if schedule.num_stages == RANKS else stages
    run = schedule.make(given, MICROBATCHES, loss_fn=case.loss_fn)
    inputs, target = case.batch()
    arguments = (inputs,) if 0 in parts else ()
    is_last = schedule.num_stages - 1 in parts

    def step() -> Tensor | None:
        for part in parts.values():
            part.zero_grad()
        losses: list[Tensor] = []
        targets = {"target": target, "losses": losses} if is_last else {}
        run.step(*arguments, **targets, return_outputs=False)
        return torch.stack(losses).mean() if is_last else None

    return step


@dataclass(frozen=True)
class Contestant:
    """How to make a step function, and in how many processes it runs."""

    make_step: Callable[[Case], Step]
    num_processes: int = RANKS


UNSPLIT, COMPILED = "unsplit", "unsplit, torch.compile"
MODES = {
    "plain": {
        UNSPLIT: Contestant(unsplit_step, 1),
        "pipec, one process": Contestant(pipec_step, 1),
        "pipec, torchrun": Contestant(pipec_step),
        "pipec, as_module": Contestant(module_step),
        PEER: Contestant(peer_step),
    },
    "compiled": {
        COMPILED: Contestant(partial(unsplit_step, compiled=True), 1),
        "pipec, inductor": Contestant(partial(pipec_step, kernels="inductor")),
        f"{PEER}, torch.compile": Contestant(partial(peer_step, compiled=True)),
    },
    "outside": {
        "pipec, one process, GPipe": Contestant(partial(pipec_step, schedule="gpipe"), 1),
        "pipec, one process, loss outside": Contestant(
            partial(module_step, outside=True, schedule="gpipe"), 1
        ),
        "pipec, torchrun, GPipe": Contestant(partial(pipec_step, schedule="gpipe")),
        "pipec, torchrun, loss outside": Contestant(partial(module_step, outside=True, schedule="gpipe")),
    },
    "best": {
        UNSPLIT: Contestant(unsplit_step, 1),
        "pipec, auto": Contestant(partial(pipec_step, schedule="auto")),
        f"{PEER}, GPipe": Contestant(
            partial(peer_step, schedule=PeerSchedule(pipelining.ScheduleGPipe, ONE_EACH))
        ),
        f"{PEER}, 1F1B": Contestant(peer_step),
        f"{PEER}, interleaved 1F1B": Contestant(
            partial(peer_step, schedule=PeerSchedule(pipelining.ScheduleInterleaved1F1B, ROUND_ROBIN))
        ),
        f"{PEER}, interleaved zero bubble": Contestant(
            partial(peer_step, schedule=PeerSchedule(pipelining.ScheduleInterleavedZeroBubble, ROUND_ROBIN))
        ),
        f"{PEER}, ZBV": Contestant(
            partial(peer_step, schedule=PeerSchedule(pipelining.ScheduleZBVZeroBubble, THERE_AND_BACK))
        ),
    },
}


@dataclass
class Times:
    """Seconds of each step on rank 0, where the last backward ends, and of the processor, on all ranks."""

    clock: list[float]
    processor: list[float]

    def add(self, other: "Times") -> None:
        self.clock += other.clock
        self.processor += other.processor


def measure_here(mode: str, contestant: str, case: Case, num_steps: int, folder: Path) -> None:
    """In a process of the contestant: time the steps; leave the seconds and the first loss in ``folder``."""
    torch.set_num_threads(1)
    step = MODES[mode][contestant].make_step(case)
    loss = step()
    for _ in range(WARMUP_STEPS - 1):
        step()
    times = Times([], [])
    for _ in range(num_steps):
        start, used = time.perf_counter(), processor_seconds()
        step()
        times.clock.append(time.perf_counter() - start)
        times.processor.append(processor_seconds() - used)
    result = {**asdict(times), "loss": None if loss is None else loss.item()}
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(mode: str, contestant: str, case: Case, num_steps: int) -> tuple[Times, float]:
    """The times of the steps, and the first loss."""
    num_processes = MODES[mode][contestant].num_processes
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--measure-here", mode, contestant, case.name, folder, "--steps", str(num_steps)]
        in_processes(__file__, num_processes, arguments)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_processes)]
    processor = [sum(each) for each in zip(*(rank["processor"] for rank in ranks), strict=True)]
    loss = next(rank["loss"] for rank in ranks if rank["loss"] is not None)
    return Times(ranks[0]["clock"], processor), loss


def compare(
    mode: str, case: Case, contestants: list[str], num_rounds: int, num_steps: int
) -> dict[str, Times]:
    """Times of every timed step by contestant, over rounds that alternate; all must agree on the loss."""
    times: dict[str, Times] = {name: Times([], []) for name in contestants}
    losses = {}
    for _, name in itertools.product(range(num_rounds), contestants):
        measured, losses[name] = measure(mode, name, case, num_steps)
        times[name].add(measured)
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise RuntimeError(f"the contestants disagree on the loss of {case.name}: {losses}")
    return times


def lines(case: str, mode: str, times: dict[str, Times]) -> Iterator[str]:
    """A line of the table for each contestant, and for the bound where the unsplit model ran."""
    times = dict(times)
    for name in times.keys() & {UNSPLIT, COMPILED}:
        times["1F1B bound"] = Times([BOUND * value for value in times[name].clock], times[name].processor)
    medians = {name: statistics.median(each.clock) for name, each in times.items()}
    peer = min((median for name, median in medians.items() if name.startswith(PEER)), default=None)
    for name, each in times.items():
        ratios = [
            f"{medians[name] / other:.2f}" if other else "" for other in (peer, medians.get("1F1B bound"))
        ]
        spread = f"{1e3 * min(each.clock):.0f} to {1e3 * max(each.clock):.0f}"
        processor = f"{1e3 * statistics.median(each.processor):.0f}"
        yield row(case, mode, name, f"{1e3 * medians[name]:.0f}", spread, *ratios, processor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    names = [*dict.fromkeys(name for contestants in MODES.values() for name in contestants)]
    parser.add_argument("--contestants", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each contestant in each round")
    parser.add_argument("--measure-here", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.measure_here:
        mode, contestant, case, folder = args.measure_here
        measure_here(mode, contestant, CASES[case], args.steps, Path(folder))
        return

    headings = ("median ms", "min to max", "/ peer", "/ bound", "processor ms")
    print("\n".join(table("model", "mode", "contestant", *headings, numbers_from=3)), flush=True)
    for case, mode in itertools.product(args.cases, args.modes):
        contestants = [name for name in MODES[mode] if name in args.contestants]
        times = compare(mode, CASES[case], contestants, args.rounds, args.steps)
        print("\n".join(lines(case, mode, times)), flush=True)
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    print(f"\n{machine}; {RANKS} ranks of 1 thread, {MICROBATCHES} microbatches")


if __name__ == "__main__":
    main()
