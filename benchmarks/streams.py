"""How fast mini-batches come out of two ranks whose stages sleep, with a flush after each and without.

python benchmarks/streams.py
python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/streams.py

A rank takes 30 ms for a microbatch. Without a flush one mini-batch should come out in the time that the
slowest stage takes for it; with one, in (m + p - 1) / m of that, for m microbatches on p ranks.
"""

import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from schedules import MICROBATCHES, RANKS, SECONDS, artifact, source

from pipec.artifact.directory import Artifact
from pipec.console import log
from pipec.ir import Ending, Link, Payload, Stream, Value
from pipec.plan.predictions import simulate_plan, step_seconds
from pipec.programs.fold import fold, num_to_lower
from pipec.programs.lower import chain_links
from pipec.programs.verify import verify_plan
from pipec.runtime.execution import Execution, Ranks
from pipec.runtime.outcomes import StreamBatch
from pipec.runtime.span import Span
from pipec.runtime.stream_execution import StreamExecution
from pipec.runtime.updates import Updates
from pipec.schedules import ASYNCHRONOUS, make_schedule

BATCHES, WARMUP = 40, 10
SLOWEST = sum(SECONDS.values())
"""Seconds that a rank takes for a microbatch."""


@dataclass(frozen=True)
class Row:
    """Seconds from one mini-batch to the next."""

    schedule: str
    microbatches: int
    simulated: float
    measured: float

    @property
    def rate(self) -> float:
        """As a share of the rate of the slowest stage."""
        return self.microbatches * SLOWEST / self.measured


def stream_artifact(name: str) -> Artifact:
    """The sleeping stages of ``schedules.py`` under a schedule without a flush."""
    made, replicas = ASYNCHRONOUS[name], (1,) * RANKS
    per_batch = made.per_batch(replicas)
    count = num_to_lower(Stream(made.versions, per_batch), replicas)
    schedule = made.of_batches(replicas, per_batch, count // per_batch)
    loss = (Value("loss", "float32", ()),)
    links = (*chain_links(RANKS), Link(RANKS - 1, -1, Payload.OUTCOME, loss))
    ending = Ending(updates=True, stream=schedule.stream)
    plan = replace(
        artifact(make_schedule("1f1b", RANKS, MICROBATCHES)).plan,
        schedule=name,
        num_microbatches=per_batch,
        links=links,
        link_seconds=(0.0,) * len(links),
        ending=ending,
    )
    programs = fold(schedule, links, (), ending)
    verify_plan(plan, programs)
    return Artifact(plan, tuple(source(k, RANKS, SECONDS, 1) for k in range(RANKS)), programs, {})


def measure_stream(name: str, ranks: Ranks) -> Row:
    made = stream_artifact(name)
    count, parameters = made.plan.num_microbatches, parameters_of(made)
    updates = Updates(functools.partial(torch.optim.SGD, lr=0.1), None, parameters)
    updates.bind(made.plan, parameters, ranks.devices, ranks.world.distributed, lambda own: [own])
    execution = StreamExecution(made, parameters, {}, ranks, updates)
    batch = StreamBatch([{"x": torch.zeros(1)}] * count, [1] * count, [1 / count] * count)
    run = execution.begin(lambda number: batch if number < BATCHES else None, 0)
    times = []
    while run.results(updates.optimizer.hyperparameters()) is not None:
        times.append(time.perf_counter())
    measured = (times[-1] - times[WARMUP]) / (len(times) - 1 - WARMUP)
    return Row(name, count, step_seconds(simulate_plan(made.plan, made.programs)), measured)


def measure_steps(name: str, ranks: Ranks) -> Row:
    made = artifact(make_schedule(name, RANKS, MICROBATCHES))
    execution = Execution(made, parameters_of(made), {}, ranks)
    span = Span([1] * MICROBATCHES, MICROBATCHES)
    times = []
    for _ in range(BATCHES // MICROBATCHES + 1):
        execution.run([torch.zeros(MICROBATCHES)], span, 0)
        times.append(time.perf_counter())
    measured = (times[-1] - times[0]) / (len(times) - 1)
    return Row(name, MICROBATCHES, step_seconds(simulate_plan(made.plan, made.programs)), measured)


def parameters_of(made: Artifact) -> dict[str, torch.nn.Parameter]:
    return {f"w{k}": torch.nn.Parameter(torch.zeros(1)) for k in range(len(made.plan.stages))}


def table(rows: list[Row]) -> Iterator[str]:
    yield "| schedule | microbatches | simulated ms | measured ms | of the slowest stage's rate |"
    yield "|---|--:|--:|--:|--:|"
    for row in rows:
        times = f"{1e3 * row.simulated:.1f} | {1e3 * row.measured:.1f}"
        yield f"| {row.schedule} | {row.microbatches} | {times} | {row.rate:.1%} |"


def main() -> None:
    ranks = Ranks(RANKS, timeout=60.0)
    rows = [measure_steps("1f1b", ranks), *(measure_stream(name, ranks) for name in ASYNCHRONOUS)]
    log("\n".join(table(rows)))


if __name__ == "__main__":
    main()
