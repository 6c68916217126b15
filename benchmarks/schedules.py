"""Schedules as simulated and as they run, on two ranks whose stages sleep: costs that are known exactly.

python benchmarks/schedules.py
python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/schedules.py
sudo benchmarks/link.sh 2gbit python benchmarks/schedules.py --message-mib 2 4
python benchmarks/schedules.py --tail

The stages go through everything a model does but capture: schedule, lowering, verification, the interpreter,
its transport. Times are from the first compute of any rank to the end of the last, median over steps.

``--message-mib`` measures the model of time instead, between two processes: it makes messages so large that
they take a good share of a stage's time, and compares the step with two simulations. In the first,
communication overlaps compute and a directed channel carries one message at a time; that is the model of
``pipec.timeline.simulate``. In the second, a rank computes nothing while it sends.

``--tail`` simulates what a loss that mixes rows costs by schedule: all forwards run before its tail, which
itself takes no time here.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from common import row
from common import table as heading

from pipec.artifact.artifact import Artifact
from pipec.console import log
from pipec.errors import InputError
from pipec.ir import InputLeaf, Link, Mode, Payload, Phase, Plan, Schedule, Stage, StageCost, Tail, Value
from pipec.plan.predictions import simulate_plan
from pipec.programs.lower import bare_plan, chain_links, lower
from pipec.programs.rank_memory import peak_in_flight
from pipec.programs.tail_order import with_forwards_first
from pipec.programs.verify import verify, verify_step
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.execution import Execution
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.step.timestamps import RecordedStep
from pipec.schedules import SCHEDULES as NAMED
from pipec.schedules import Workload, make_schedule
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate
from pipec.timeline.trace import measured_timeline

RANKS, MICROBATCHES, STEPS, WARMUP = 2, 8, 9, 2
SECONDS = {Phase.FORWARD: 0.012, Phase.BACKWARD_INPUT: 0.010, Phase.BACKWARD_WEIGHT: 0.008}
"""What the work of a rank on a microbatch takes; ranks with several stages divide it among them."""

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v")

FLOATS_PER_MIB = 2**18

SOURCE = """
import time

import torch

PARAMETERS = ("w{stage}",)
BUFFERS = ()
UPDATED_BUFFERS = ()
INPUTS = {inputs}
MESSAGE = torch.zeros({num_floats})


def forward(frame):
    frame.pop("{received}", None)
    time.sleep({forward})
    return {{"{sent}": {output}}}, [frame["w"][0]], ()


def backward(frame):
    del frame["saved"], frame["{gradient}"]
    time.sleep({backward_input} + {backward_weight})
    return {sent_back}, (torch.zeros(1),)


def backward_input(frame):
    saved = frame.pop("saved")
    del frame["{gradient}"]
    time.sleep({backward_input})
    return {sent_back}, saved, (None,)


def backward_weight(frame):
    del frame["saved"]
    time.sleep({backward_weight})
    return (torch.zeros(1),)
"""


def source(stage: int, num_stages: int, seconds: dict[Phase, float], num_floats: int) -> str:
    last = stage == num_stages - 1
    return SOURCE.format(
        stage=stage,
        num_floats=num_floats,
        inputs="()" if stage else '("x",)',
        received=f"hidden_{stage}" if stage else "x",
        sent="loss" if last else f"hidden_{stage + 1}",
        output="torch.zeros(())" if last else "MESSAGE",
        gradient="grad_loss" if last else f"grad_hidden_{stage + 1}",
        sent_back=f'{{"grad_hidden_{stage}": MESSAGE}}' if stage else "{}",
        **seconds,
    )


def artifact(schedule: Schedule, num_floats: int = 1, message_seconds: float = 0.0) -> Artifact:
    """Stages of equal cost in a chain, under ``schedule``, which send ``num_floats`` numbers at a time."""
    stages_per_rank = schedule.num_stages // RANKS
    seconds = {phase: time / stages_per_rank for phase, time in SECONDS.items()}
    whole = seconds[Phase.BACKWARD_INPUT] + seconds[Phase.BACKWARD_WEIGHT]
    cost = StageCost({**seconds, Phase.BACKWARD: whole})
    chain = [
        replace(link, values=tuple(replace(value, shape=(f"{num_floats}*b",)) for value in link.values))
        for link in chain_links(schedule.num_stages)
    ]
    loss = Link(schedule.num_stages - 1, -1, Payload.RESULT, (Value("loss", "float32", ()),))
    links = (*chain, loss)
    plan = Plan(
        Mode.TRAIN,
        schedule.name,
        MICROBATCHES,
        1,
        schedule.placement,
        tuple(Stage(k, k, k, parameters=(f"w{k}",), cost=cost) for k in range(schedule.num_stages)),
        links,
        (*(message_seconds for _ in chain), 0.0),
        inputs=(InputLeaf(0, "x", True, Value("x", "float32", ("b",))),),
    )
    programs = lower(schedule, plan)
    verify_step(plan, programs)
    sources = tuple(source(k, schedule.num_stages, seconds, num_floats) for k in range(schedule.num_stages))
    return Artifact(plan, sources, programs, {})


@dataclass(frozen=True)
class Row:
    """Seconds of a step."""

    schedule: str
    simulated: float
    measured: float


def measure(name: str, ranks: Ranks) -> Row:
    made = artifact(make_schedule(name, RANKS, MICROBATCHES))
    return Row(name, elapsed(simulate_plan(made.plan, made.programs)), measured_seconds(made, ranks))


def measured_seconds(made: Artifact, ranks: Ranks) -> float:
    """The time of a step as it runs, median over steps."""
    parameters = {f"w{k}": torch.nn.Parameter(torch.zeros(1)) for k in range(len(made.plan.stages))}
    execution = Execution(made, parameters, {}, ranks)
    recorded: list[RecordedStep] = []
    for _ in range(WARMUP + STEPS):
        execution.run(
            [[torch.zeros(MICROBATCHES)]], BatchSlice([1] * MICROBATCHES, MICROBATCHES), 0, recorded
        )
    steps = ranks.gathered(recorded)[WARMUP:]
    return statistics.median(elapsed(measured_timeline(step.programs, step.timestamps)) for step in steps)


def elapsed(timeline: Timeline) -> float:
    """From the start of the first compute of any rank to the end of the last."""
    computes = timeline.computes
    return max(event.end for event in computes) - min(event.start for event in computes)


def table(rows: list[Row]) -> Iterator[str]:
    reference = next((each for each in rows if each.schedule == "1f1b"), rows[0])
    ratios = ("/ simulated", "simulated, of 1F1B", "measured, of 1F1B")
    yield from heading("schedule", "simulated ms", "measured ms", *ratios)
    for each in rows:
        times = f"{1e3 * each.simulated:.1f}", f"{1e3 * each.measured:.1f}"
        pairs = (
            (each.measured, each.simulated),
            (each.simulated, reference.simulated),
            (each.measured, reference.measured),
        )
        yield row(each.schedule, *times, *(f"{one / other:.3f}" for one, other in pairs))


@dataclass(frozen=True)
class MessageRow:
    """Seconds of a message alone, and of a step measured and in the two simulations."""

    schedule: str
    mib: float
    message: float
    measured: float
    overlapping: float
    blocking: float


def measure_with_messages(name: str, mib: float, ranks: Ranks) -> MessageRow:
    num_floats = int(mib * FLOATS_PER_MIB)
    message = exchange_seconds([(0, 1)], num_floats)
    made = artifact(make_schedule(name, RANKS, MICROBATCHES), num_floats, message)
    simulated = [elapsed(simulate_plan(plan, made.programs)) for plan in (made.plan, blocking(made.plan))]
    measured = measured_seconds(made, ranks)
    message = (message + exchange_seconds([(0, 1)], num_floats)) / 2
    return MessageRow(name, mib, message, measured, *simulated)


def blocking(plan: Plan) -> Plan:
    """The plan in which the phase that makes a message lasts until the message has arrived."""
    stages = list(plan.stages)
    for link, seconds in zip(plan.links, plan.link_seconds, strict=True):
        if link.target >= 0 and plan.placement[link.source] != plan.placement[link.target]:
            stage = stages[link.source]
            longer = {phase: stage.cost.seconds[phase] + seconds for phase in link.payload.producers}
            cost = replace(stage.cost, seconds={**stage.cost.seconds, **longer})
            stages[link.source] = replace(stage, cost=cost)
    return replace(plan, stages=tuple(stages), link_seconds=(0.0,) * len(plan.links))


def exchange_seconds(directions: Sequence[tuple[int, int]], num_floats: int) -> float:
    """From when messages are sent in these directions at once until all have arrived. Every rank calls it."""
    tensors = [torch.zeros(num_floats) for _ in directions]
    rank, seconds = dist.get_rank(), []
    for _ in range(WARMUP + STEPS):
        dist.barrier()
        begun = time.perf_counter()
        works = [
            dist.isend(tensor, target, tag=tag) if rank == source else dist.irecv(tensor, source, tag=tag)
            for tag, ((source, target), tensor) in enumerate(zip(directions, tensors, strict=True), 1)
        ]
        for work in works:
            work.wait()
        seconds.append(time.perf_counter() - begun)
    slowest = torch.tensor(statistics.median(seconds[WARMUP:]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def channel_table(sizes: Sequence[float]) -> Iterator[str]:
    """How long messages take that are sent at once, as multiples of one alone."""
    several = ("two in one direction", "three in one direction", "one in each direction")
    yield from heading("MiB", "one message ms", *several)
    for mib in sizes:
        ways = [[(0, 1)], [(0, 1)] * 2, [(0, 1)] * 3, [(0, 1), (1, 0)]]
        one, *others = (exchange_seconds(way, int(mib * FLOATS_PER_MIB)) for way in ways)
        yield row(f"{mib:g}", f"{1e3 * one:.1f}", *(f"{other / one:.2f}" for other in others))


def message_table(rows: Sequence[MessageRow]) -> Iterator[str]:
    yield from heading("schedule", "MiB", "message ms", "measured ms", "/ overlapping", "/ blocking")
    for each in rows:
        times = f"{1e3 * each.message:.1f}", f"{1e3 * each.measured:.1f}"
        ratios = (f"{each.measured / other:.3f}" for other in (each.overlapping, each.blocking))
        yield row(each.schedule, f"{each.mib:g}", *times, *ratios)


def tail_table(num_ranks: int = 8, num_microbatches: int = 32) -> Iterator[str]:
    """The step in units of a forward, and the microbatches in flight, without a tail and with one."""
    yield from heading("schedule", "without a tail", "all forwards first", "in flight", "forwards first")
    for name in NAMED:
        with suppress(InputError):
            schedule = make_schedule(name, num_ranks, num_microbatches)
            found = [_with_tail(schedule, has_tail) for has_tail in (False, True)]
            cells = (*(f"{time:.1f}" for time, _ in found), *(f"{count:g}" for _, count in found))
            yield row(f"`{name}`", *cells)


def _with_tail(schedule: Schedule, has_tail: bool) -> tuple[float, float]:
    plan = bare_plan(schedule, chain_links(schedule.num_stages))
    stages = [*plan.stages]
    rows = (Value("rows", "float32", ("b", 1)),)
    stages[-1] = replace(stages[-1], tail=Tail(rows, rows) if has_tail else None)
    plan = replace(plan, stages=tuple(stages))
    num_chunks = len(plan.stages) // plan.num_ranks
    programs = lower(with_forwards_first(schedule) if has_tail else schedule, plan)
    verify(plan, programs)
    one = 1 / num_chunks
    work = Workload.uniform(len(plan.stages), forward=one, backward_input=one, backward_weight=one)
    costs = work.costs(schedule, plan.links)
    return simulate(programs, costs).makespan, max(map(peak_in_flight, programs)) / num_chunks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    parser.add_argument("--message-mib", nargs="+", type=float, default=(), help="sizes of messages")
    parser.add_argument("--tail", action="store_true", help="what a loss that mixes rows costs")
    args = parser.parse_args()
    if args.tail:
        print("\n".join(tail_table()))
        return
    ranks = Ranks(RANKS, timeout=60.0)
    if not args.message_mib:
        log("\n".join(table([measure(name, ranks) for name in args.schedules])))
        return
    if not ranks.world.is_distributed:
        raise InputError(
            "messages within a process take no time; start --message-mib with benchmarks/link.sh or torchrun"
        )
    dist.init_process_group("gloo")
    log("\n".join(channel_table(args.message_mib)))
    rows = [measure_with_messages(name, mib, ranks) for mib in args.message_mib for name in args.schedules]
    log("\n".join(message_table(rows)))


if __name__ == "__main__":
    main()
