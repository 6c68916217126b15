"""How fast mini-batches come out of two ranks whose stages sleep, with a flush after each and without.

python benchmarks/streams.py

The ranks are threads first, then processes over gloo, which the command starts itself. A stage sleeps 30 ms
for a microbatch, which is measured as well. Without a flush one mini-batch should come out in the time that
the slowest stage takes for it; with one, in (m + p - 1) / m of that, for m microbatches on p ranks. What is
timed is what a script sees: from one loss to the next, once the pipeline is full. Every run is repeated; the
median counts.
"""

import functools
import statistics
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from common import in_processes, row, table
from schedules import MICROBATCHES, RANKS, SECONDS, artifact, source

from pipec.artifact.artifact import Artifact
from pipec.console import log
from pipec.ir import Link, Payload, Stream, SyncSpec, Value
from pipec.plan.predictions import simulate_plan, step_seconds
from pipec.programs.lower import chain_links
from pipec.programs.lower_periodic import lower_periodic, num_microbatches_to_lower
from pipec.programs.verify import verify
from pipec.runtime.step.batch_slice import BatchSlice
from pipec.runtime.step.execution import Execution
from pipec.runtime.step.optimizer_updates import OptimizerUpdates
from pipec.runtime.step.ranks import Ranks
from pipec.runtime.step.stream_results import StreamBatch
from pipec.schedules import ASYNCHRONOUS_SCHEDULES, make_schedule

BATCHES, WARMUP, RUNS = 40, 10, 5


@functools.cache
def slowest() -> float:
    """Seconds that a stage alone takes for a microbatch. Sleeping takes longer than it was asked to."""
    times = [time.perf_counter()]
    for _ in range(BATCHES):
        for seconds in SECONDS.values():
            time.sleep(seconds)
        times.append(time.perf_counter())
    return statistics.median(end - start for start, end in pairwise(times))


@dataclass(frozen=True)
class Row:
    """Seconds from one mini-batch to the next, simulated and ``measured`` in each run."""

    schedule: str
    microbatches: int
    simulated: float
    measured: list[float]

    def line(self, ranks: str) -> str:
        """With rates as shares of that of the slowest stage."""
        rates = [self.microbatches * slowest() / seconds for seconds in self.measured]
        times = f"{1e3 * self.simulated:.1f}", f"{1e3 * statistics.median(self.measured):.1f}"
        spread = f"{min(rates):.1%} to {max(rates):.1%}"
        return row(self.schedule, ranks, *times, f"{statistics.median(rates):.1%}", spread)


def stream_artifact(name: str) -> Artifact:
    """The sleeping stages of ``schedules.py`` under a schedule without a flush."""
    made, replicas = ASYNCHRONOUS_SCHEDULES[name], (1,) * RANKS
    per_batch = made.min_microbatches(replicas)
    count = num_microbatches_to_lower(Stream(made.versions, per_batch), replicas)
    schedule = made.for_batches(replicas, per_batch, count // per_batch)
    loss = (Value("loss", "float32", ()),)
    links = (*chain_links(RANKS), Link(RANKS - 1, -1, Payload.MICROBATCH_RESULT, loss))
    sync_spec = SyncSpec(updates=True, stream=schedule.stream)
    plan = replace(
        artifact(make_schedule("1f1b", RANKS, MICROBATCHES)).plan,
        schedule=name,
        num_microbatches=per_batch,
        links=links,
        link_seconds=(0.0,) * len(links),
        sync_spec=sync_spec,
    )
    programs = lower_periodic(schedule, plan)
    verify(plan, programs)
    return Artifact(plan, tuple(source(k, RANKS, SECONDS, 1) for k in range(RANKS)), programs, {})


def measure_stream(name: str, ranks: Ranks) -> Row:
    made = stream_artifact(name)
    count, parameters = made.plan.num_microbatches, parameters_of(made)
    updates = OptimizerUpdates(functools.partial(torch.optim.SGD, lr=0.1), None, parameters)
    updates.bind(made.plan, parameters, ranks.devices, ranks.world.is_distributed, lambda own: [own], {})
    execution = Execution(made, parameters, {}, ranks, updates)
    batch = StreamBatch([{"x": torch.zeros(1)}] * count, BatchSlice([1] * count, count))
    measured = []
    for _ in range(RUNS):
        run = execution.begin(lambda number: batch if number < BATCHES else None, batch, 0)
        times = []
        while run.results(updates.optimizer.hyperparameters()) is not None:
            times.append(time.perf_counter())
        measured.append((times[-1] - times[WARMUP]) / (len(times) - 1 - WARMUP))
    return Row(name, count, simulated_seconds(made), measured)


def measure_steps(name: str, ranks: Ranks) -> Row:
    made = artifact(make_schedule(name, RANKS, MICROBATCHES))
    execution = Execution(made, parameters_of(made), {}, ranks)
    span = BatchSlice([1] * MICROBATCHES, MICROBATCHES)
    times = []
    for _ in range(1 + RUNS):
        execution.run([[torch.zeros(MICROBATCHES)]], span, 0)
        times.append(time.perf_counter())
    measured = [end - start for start, end in pairwise(times)]
    return Row(name, MICROBATCHES, simulated_seconds(made), measured)


def simulated_seconds(made: Artifact) -> float:
    return step_seconds(made.plan, simulate_plan(made.plan, made.programs))


def parameters_of(made: Artifact) -> dict[str, torch.nn.Parameter]:
    return {f"w{k}": torch.nn.Parameter(torch.zeros(1)) for k in range(len(made.plan.stages))}


def main() -> None:
    ranks = Ranks(RANKS, timeout=60.0)
    alone = not ranks.world.is_distributed
    if alone:
        headings = ("simulated ms", "measured ms", "of the slowest stage's rate", "of all runs")
        log("\n".join(table("schedule", "ranks", *headings, numbers_from=2)))
    for each in (
        measure_steps("1f1b", ranks),
        *(measure_stream(name, ranks) for name in ASYNCHRONOUS_SCHEDULES),
    ):
        log(each.line("threads" if alone else "processes"))
    if alone:
        log(in_processes(__file__, RANKS, []))


if __name__ == "__main__":
    main()
