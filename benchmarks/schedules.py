"""Schedules as simulated and as they run, on two ranks whose stages sleep: costs that are known exactly.

python benchmarks/schedules.py
python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/schedules.py

The stages go through everything a model does but capture: schedule, lowering, verification, the interpreter,
its transport. Times are from the first compute of any rank to the end of the last, median over steps.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pipec.artifact.directory import Artifact
from pipec.console import log
from pipec.ir import Input, Link, Mode, Payload, Phase, Plan, Schedule, Stage, StageCost, Value
from pipec.plan.predictions import simulate_plan
from pipec.programs.lower import chain_links, lower
from pipec.programs.verify import verify_programs
from pipec.runtime.execution import Execution, Ranks
from pipec.runtime.recording import RecordedStep
from pipec.schedules import make_schedule
from pipec.timeline.events import Timeline
from pipec.timeline.trace import measured_timeline

RANKS, MICROBATCHES, STEPS, WARMUP = 2, 8, 9, 2
SECONDS = {Phase.FORWARD: 0.012, Phase.BACKWARD_INPUT: 0.010, Phase.BACKWARD_WEIGHT: 0.008}
"""What the work of a rank on a microbatch takes; ranks with several stages divide it among them."""

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "zb-v")

SOURCE = """
import time

import torch

PARAMETERS = ("w{stage}",)
BUFFERS = ()
UPDATED_BUFFERS = ()


def forward(w, {received}):
    time.sleep({forward})
    return {{"{sent}": torch.zeros({shape})}}, [w[0]], ()


def backward(w, saved, {gradient}):
    time.sleep({backward_input} + {backward_weight})
    return {sent_back}, (torch.zeros(1),)


def backward_input(w, saved, {gradient}):
    time.sleep({backward_input})
    return {sent_back}, saved, (None,)


def backward_weight(w, saved):
    time.sleep({backward_weight})
    return (torch.zeros(1),)
"""


def source(stage: int, num_stages: int, seconds: dict[Phase, float]) -> str:
    last = stage == num_stages - 1
    return SOURCE.format(
        stage=stage,
        received=f"hidden_{stage}" if stage else "x",
        sent="loss" if last else f"hidden_{stage + 1}",
        shape="()" if last else "1",
        gradient="grad_loss" if last else f"grad_hidden_{stage + 1}",
        sent_back=f'{{"grad_hidden_{stage}": torch.zeros(1)}}' if stage else "{}",
        **seconds,
    )


def artifact(schedule: Schedule) -> Artifact:
    """Stages of equal cost in a chain, under ``schedule``."""
    stages_per_rank = schedule.num_stages // RANKS
    seconds = {phase: time / stages_per_rank for phase, time in SECONDS.items()}
    whole = seconds[Phase.BACKWARD_INPUT] + seconds[Phase.BACKWARD_WEIGHT]
    cost = StageCost({**seconds, Phase.BACKWARD: whole})
    loss = Link(schedule.num_stages - 1, -1, Payload.RESULT, (Value("loss", "float32", ()),))
    links = (*chain_links(schedule.num_stages), loss)
    plan = Plan(
        Mode.TRAIN,
        schedule.name,
        MICROBATCHES,
        1,
        schedule.placement,
        tuple(Stage(k, k, k, parameters=(f"w{k}",), cost=cost) for k in range(schedule.num_stages)),
        links,
        (0.0,) * len(links),
        inputs=(Input(0, "x", True, Value("x", "float32", ("b",))),),
    )
    programs = lower(schedule, links)
    verify_programs(programs, plan.placement, links, MICROBATCHES)
    sources = tuple(source(k, schedule.num_stages, seconds) for k in range(schedule.num_stages))
    return Artifact(plan, sources, programs, {})


@dataclass(frozen=True)
class Row:
    """Seconds of a step."""

    schedule: str
    simulated: float
    measured: float


def measure(name: str, ranks: Ranks) -> Row:
    made = artifact(make_schedule(name, RANKS, MICROBATCHES))
    parameters = {f"w{k}": torch.nn.Parameter(torch.zeros(1)) for k in range(len(made.plan.stages))}
    execution = Execution(made, parameters, {}, ranks)
    recorded: list[RecordedStep] = []
    for _ in range(WARMUP + STEPS):
        execution.run([torch.zeros(MICROBATCHES)], [1] * MICROBATCHES, MICROBATCHES, 0, 0, recorded)
    steps = ranks.gathered(recorded)[WARMUP:]
    timelines = [measured_timeline(step.programs, step.stamps) for step in steps]
    return Row(
        name, elapsed(simulate_plan(made.plan, made.programs)), statistics.median(map(elapsed, timelines))
    )


def elapsed(timeline: Timeline) -> float:
    """From the start of the first compute of any rank to the end of the last."""
    computes = timeline.computes
    return max(event.end for event in computes) - min(event.start for event in computes)


def table(rows: list[Row]) -> Iterator[str]:
    reference = next((row for row in rows if row.schedule == "1f1b"), rows[0])
    yield "| schedule | simulated ms | measured ms | ratio | simulated, of 1F1B | measured, of 1F1B |"
    yield "|---|--:|--:|--:|--:|--:|"
    for row in rows:
        yield (
            f"| {row.schedule} | {1e3 * row.simulated:.1f} | {1e3 * row.measured:.1f} "
            f"| {row.measured / row.simulated:.3f} | {row.simulated / reference.simulated:.3f} "
            f"| {row.measured / reference.measured:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    args = parser.parse_args()
    ranks = Ranks(RANKS, timeout=60.0)
    log("\n".join(table([measure(name, ranks) for name in args.schedules])))


if __name__ == "__main__":
    main()
