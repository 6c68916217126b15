"""Schedules as simulated and as they run, on two ranks whose stages sleep: costs that are known exactly.

python benchmarks/schedules.py                 # between threads, then between processes over gloo
python benchmarks/schedules.py --tail

The stages go through everything a model does but capture: schedule, lowering, verification, the interpreter,
its transport. Times are from the first compute of any rank to the end of the last, median over steps. Of an
asynchronous schedule they are what a script sees: from one loss to the next, once the pipeline is full.

``--tail`` simulates what a loss that mixes rows costs by schedule: all forwards run before its tail, which
itself takes no time here.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import torch
from common import in_processes, row, table

from pipec.artifact.artifact import Artifact
from pipec.console import log
from pipec.errors import InputError
from pipec.ir import (
    InputLeaf,
    Link,
    Mode,
    Payload,
    Phase,
    Plan,
    Schedule,
    Stage,
    StageCost,
    Stream,
    SyncSpec,
    Tail,
    Value,
)
from pipec.plan.predictions import simulate_plan, step_seconds
from pipec.programs.lower import bare_plan, chain_links, lower
from pipec.programs.lower_periodic import lower_periodic, num_microbatches_to_lower
from pipec.programs.rank_memory import peak_in_flight
from pipec.programs.tail_order import with_forwards_first
from pipec.programs.verify import verify, verify_step
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.execution import Execution
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.step.stream_results import StreamBatch
from pipec.runtime.step.timestamps import RecordedStep
from pipec.schedules import ASYNCHRONOUS_SCHEDULES, Workload, make_schedule
from pipec.schedules import SCHEDULES as NAMED
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate
from pipec.timeline.trace import measured_timeline

RANKS, MICROBATCHES, STEPS, WARMUP, STREAM_BATCHES = 2, 8, 9, 2, 40
SECONDS = {Phase.FORWARD: 0.012, Phase.BACKWARD_INPUT: 0.010, Phase.BACKWARD_WEIGHT: 0.008}
"""What the work of a rank on a microbatch takes; ranks with several stages divide it among them."""

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v")

SOURCE = """
import time

import torch

PARAMETERS = ("w{stage}",)
BUFFERS = ()
UPDATED_BUFFERS = ()
INPUTS = {inputs}
MESSAGE = torch.zeros(1)


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


def source(stage: int, num_stages: int, seconds: dict[Phase, float]) -> str:
    last = stage == num_stages - 1
    return SOURCE.format(
        stage=stage,
        inputs="()" if stage else '("x",)',
        received=f"hidden_{stage}" if stage else "x",
        sent="loss" if last else f"hidden_{stage + 1}",
        output="torch.zeros(())" if last else "MESSAGE",
        gradient="grad_loss" if last else f"grad_hidden_{stage + 1}",
        sent_back=f'{{"grad_hidden_{stage}": MESSAGE}}' if stage else "{}",
        **seconds,
    )


def artifact(schedule: Schedule) -> Artifact:
    """Stages of equal cost in a chain, under ``schedule``, whose messages take no time."""
    stages_per_rank = schedule.num_stages // RANKS
    seconds = {phase: time / stages_per_rank for phase, time in SECONDS.items()}
    whole = seconds[Phase.BACKWARD_INPUT] + seconds[Phase.BACKWARD_WEIGHT]
    cost = StageCost({**seconds, Phase.BACKWARD: whole})
    chain = [
        replace(link, values=tuple(replace(value, shape=("b",)) for value in link.values))
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
        (0.0,) * len(links),
        inputs=(InputLeaf(0, "x", True, Value("x", "float32", ("b",))),),
    )
    programs = lower(schedule, plan)
    verify_step(plan, programs)
    sources = tuple(source(k, schedule.num_stages, seconds) for k in range(schedule.num_stages))
    return Artifact(plan, sources, programs, {})


def stream_artifact(name: str) -> Artifact:
    """The same stages under a schedule without a flush."""
    made, replicas = ASYNCHRONOUS_SCHEDULES[name], (1,) * RANKS
    per_batch = made.min_microbatches(replicas)
    count = num_microbatches_to_lower(Stream(made.versions, per_batch), replicas)
    schedule = made.for_batches(replicas, per_batch, count // per_batch)
    loss = (Value("loss", "float32", ()),)
    links = (*chain_links(RANKS), Link(RANKS - 1, -1, Payload.MICROBATCH_RESULT, loss))
    plan = replace(
        artifact(make_schedule("1f1b", RANKS, MICROBATCHES)).plan,
        schedule=name,
        num_microbatches=per_batch,
        links=links,
        link_seconds=(0.0,) * len(links),
        sync_spec=SyncSpec(updates=True, stream=schedule.stream),
    )
    programs = lower_periodic(schedule, plan)
    verify(plan, programs)
    return Artifact(plan, tuple(source(k, RANKS, SECONDS) for k in range(RANKS)), programs, {})


def parameters_of(made: Artifact) -> dict[str, torch.nn.Parameter]:
    return {f"w{k}": torch.nn.Parameter(torch.zeros(1)) for k in range(len(made.plan.stages))}


def step_times(made: Artifact, ranks: Ranks) -> tuple[float, float]:
    """Seconds of a step, simulated and measured."""
    execution = Execution(made, parameters_of(made), {}, ranks)
    recorded: list[RecordedStep] = []
    for _ in range(WARMUP + STEPS):
        execution.run(
            [[torch.zeros(MICROBATCHES)]], BatchSlice([1] * MICROBATCHES, MICROBATCHES), 0, recorded
        )
    steps = ranks.gathered(recorded)[WARMUP:]
    measured = [elapsed(measured_timeline(step.programs, step.timestamps)) for step in steps]
    return elapsed(simulate_plan(made.plan, made.programs)), statistics.median(measured)


def stream_times(made: Artifact, ranks: Ranks) -> tuple[float, float]:
    """Seconds from one mini-batch to the next, simulated and measured."""
    count, parameters = made.plan.num_microbatches, parameters_of(made)
    updates = OptimizerUpdates(functools.partial(torch.optim.SGD, lr=0.1), None, parameters)
    updates.bind(made.plan, parameters, ranks.devices, ranks.world.is_distributed, lambda own: [own], {})
    execution = Execution(made, parameters, {}, ranks, updates)
    batch = StreamBatch([{"x": torch.zeros(1)}] * count, BatchSlice([1] * count, count))
    run = execution.begin(lambda number: batch if number < STREAM_BATCHES else None, batch, 0)
    times = []
    while run.results(updates.optimizer.hyperparameters()) is not None:
        times.append(time.perf_counter())
    measured = [end - start for start, end in pairwise(times[WARMUP:])]
    return step_seconds(made.plan, simulate_plan(made.plan, made.programs)), statistics.median(measured)


def elapsed(timeline: Timeline) -> float:
    """From the start of the first compute of any rank to the end of the last."""
    computes = timeline.computes
    return max(event.end for event in computes) - min(event.start for event in computes)


def lines(ranks: Ranks) -> Iterator[str]:
    where = "processes" if ranks.world.is_distributed else "threads"
    found = {
        name: step_times(artifact(make_schedule(name, RANKS, MICROBATCHES)), ranks) for name in SCHEDULES
    }
    found |= {name: stream_times(stream_artifact(name), ranks) for name in ASYNCHRONOUS_SCHEDULES}
    for name, (simulated, measured) in found.items():
        times = f"{1e3 * simulated:.1f}", f"{1e3 * measured:.1f}"
        yield row(name, where, *times, f"{measured / simulated:.3f}")


def tail_table(num_ranks: int = 8, num_microbatches: int = 32) -> Iterator[str]:
    """The step in units of a forward, and the microbatches in flight, without a tail and with one."""
    yield from table("schedule", "without a tail", "all forwards first", "in flight", "forwards first")
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
    parser.add_argument("--tail", action="store_true", help="what a loss that mixes rows costs")
    args = parser.parse_args()
    if args.tail:
        print("\n".join(tail_table()))
        return
    ranks = Ranks(RANKS, timeout=60.0)
    is_first = not ranks.world.is_distributed
    if is_first:
        log(
            "\n".join(
                table("schedule", "ranks", "simulated ms", "measured ms", "/ simulated", numbers_from=2)
            )
        )
    log("\n".join(lines(ranks)))
    if is_first:
        log(in_processes(__file__, RANKS, []))


if __name__ == "__main__":
    main()
