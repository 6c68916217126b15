"""Step time of one model on two ranks of one thread each: unsplit, pipec, and torch.distributed.pipelining.

    python benchmarks/step_time.py --cases "width 64" --modes plain

A step is the forward and backward of a mini-batch of 8 microbatches, with the zeroing of gradients and
without the optimizer. Every contestant runs alone in fresh processes; rounds alternate between the
contestants, so that a change in the machine's speed meets all of them. The 1F1B bound is the unsplit time
times (m + p - 1) / (m p), for m microbatches and p ranks: perfectly balanced stages, free communication.

Five modes, each with contestants of its own: "plain" and "compiled", where both sides run 1F1B, without and
with torch.compile; "best", where pipec chooses its schedule and the peer is its fastest schedule; "outside",
where the script computes the loss of the outputs, which the last stage does otherwise; and "planned", where
the peer's runtime follows the orders and the cut that `pipec plan -o order.csv` writes, beside its own
schedules on the stages that torchtitan makes. Besides the clock, a row has the processor time of a step,
summed over ranks and threads.

The contestants of "planned" take turns step by step in the same two processes, because uneven stages gain if
other programs use a core meanwhile. Their rows have the processor time of the busiest rank, and how many
cores other programs used.
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
from dataclasses import asdict, dataclass, replace
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
from pipec.ir import stages_on
from pipec.schedules import parse_orders

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
TORCHTITAN: Cuts = {2: (5,), 4: (3, 6, 8)}
"""Where torchtitan cuts by default: embedding and output layer count as a block each."""
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


def join_peers() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def peer_step(
    case: Case, schedule: PeerSchedule = ONE_F_ONE_B, compiled: bool = False, cuts: Cuts | None = None
) -> Step:
    join_peers()
    parts = replace(case, cuts=cuts or case.cuts).stages(schedule.num_stages)
    own = {number: parts[number] for number in schedule.stages[dist.get_rank()]}
    return _peer_step(case, schedule.make, own, schedule.num_stages, compiled)


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


def peer_schedules(cuts: Cuts | None = None) -> dict[str, Contestant]:
    """The peer's schedules, on stages of equal layers, or those that begin at ``cuts``."""
    known = {
        "GPipe": PeerSchedule(pipelining.ScheduleGPipe, ONE_EACH),
        "1F1B": ONE_F_ONE_B,
        "interleaved 1F1B": PeerSchedule(pipelining.ScheduleInterleaved1F1B, ROUND_ROBIN),
        "interleaved zero bubble": PeerSchedule(pipelining.ScheduleInterleavedZeroBubble, ROUND_ROBIN),
        "ZBV": PeerSchedule(pipelining.ScheduleZBVZeroBubble, THERE_AND_BACK),
    }
    return {
        f"{PEER}, {name}": Contestant(partial(peer_step, schedule=each, cuts=cuts))
        for name, each in known.items()
    }


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
        **peer_schedules(),
    },
    "planned": {
        **peer_schedules(TORCHTITAN),
        **{
            f"orders and cut of pipec, {schedule}": Contestant(partial(planned_peer_step, schedule=schedule))
            for schedule in ("1f1b", "zb-v", "auto")
        },
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


def busy_seconds() -> float:
    """Seconds for which the cores of this machine were not idle."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measure_turns_here(case: Case, contestants: Sequence[str], num_rounds: int, folder: Path) -> None:
    """In one of two processes: contestants of "planned" take turns; leave their seconds in ``folder``."""
    torch.set_num_threads(1)
    steps = {name: MODES["planned"][name].make_step(case) for name in contestants}
    losses = {name: step() for name, step in steps.items()}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
    for _, (name, step) in itertools.product(range(num_rounds), steps.items()):
        dist.barrier()
        start, used, busy = time.perf_counter(), processor_seconds(), busy_seconds()
        step()
        seconds = time.perf_counter() - start
        dist.barrier()
        found[name].append((seconds, processor_seconds() - used, busy_seconds() - busy))
    known = {name: loss.item() for name, loss in losses.items() if loss is not None}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps([found, known]))
    dist.destroy_process_group()


def compare_in_turns(case: Case, contestants: Sequence[str], num_rounds: int) -> Iterator[str]:
    """A line for each contestant of "planned", compared with the fastest peer round by round."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--turns-here", case.name, folder, "--rounds", str(num_rounds)]
        in_processes(__file__, RANKS, [*arguments, "--contestants", *contestants])
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    losses = {name: loss for _, known in ranks for name, loss in known.items()}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise RuntimeError(f"the contestants disagree on the loss of {case.name}: {losses}")
    clocks, others, busiest = dict[str, list[float]](), dict[str, float](), dict[str, float]()
    for name in contestants:
        turns = list(zip(*(found[name] for found, _ in ranks), strict=True))
        clocks[name] = [first[0] for first, *_ in turns]
        others[name] = statistics.median(
            (turn[0][2] - sum(used for _, used, _ in turn)) / turn[0][0] for turn in turns
        )
        by_rank = zip(*([used for _, used, _ in turn] for turn in turns), strict=True)
        busiest[name] = max(map(statistics.median, by_rank))
    peers = [name for name in contestants if name.startswith(PEER)]
    medians = {name: statistics.median(seconds) for name, seconds in clocks.items()}
    best, fewest = min(peers, key=medians.__getitem__), min(map(busiest.__getitem__, peers))
    for name in contestants:
        ratios = [own / peer for own, peer in zip(clocks[name], clocks[best], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        cells = (f"{1e3 * medians[name]:.0f}", f"{statistics.median(ratios):.2f}", spread)
        load = (f"{1e3 * busiest[name]:.0f}", f"{busiest[name] / fewest:.2f}", f"{others[name]:.1f}")
        yield row(case.name, name, *cells, *load)


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
    parser.add_argument("--turns-here", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.turns_here:
        case, folder = args.turns_here
        measure_turns_here(CASES[case], args.contestants, args.rounds, Path(folder))
        return

    if args.measure_here:
        mode, contestant, case, folder = args.measure_here
        measure_here(mode, contestant, CASES[case], args.steps, Path(folder))
        return

    headings = ("median ms", "min to max", "/ peer", "/ bound", "processor ms")
    print("\n".join(table("model", "mode", "contestant", *headings, numbers_from=3)), flush=True)
    for case, mode in itertools.product(args.cases, [mode for mode in args.modes if mode != "planned"]):
        contestants = [name for name in MODES[mode] if name in args.contestants]
        times = compare(mode, CASES[case], contestants, args.rounds, args.steps)
        print("\n".join(lines(case, mode, times)), flush=True)
    if "planned" in args.modes:
        headings = ("median ms", "/ best peer", "in a round", "busiest rank's ms", "/ peer's", "other cores")
        print("\n" + "\n".join(table("model", "contestant", *headings, numbers_from=2)), flush=True)
        contestants = [name for name in MODES["planned"] if name in args.contestants]
        for case in args.cases:
            print("\n".join(compare_in_turns(CASES[case], contestants, args.rounds)), flush=True)
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    print(f"\n{machine}; {RANKS} ranks of 1 thread, {MICROBATCHES} microbatches")


if __name__ == "__main__":
    main()
