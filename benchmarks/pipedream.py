"""PipeDream's plans on its published profiles, simulated: without a flush, with replicas and without.

    python benchmarks/pipedream.py DATA
    python benchmarks/pipedream.py DATA --profiles gnmt

``DATA`` holds ``pipedream-profiles/NAME.txt``, the profiles of msr-fiddle/pipedream. Every device gets
mini-batches of its own, of the size of the profile. Compared are seconds from one mini-batch to the next:

* *data parallelism*: one stage on all devices, whose sums of gradients run beside its backward;
* *straight*: the planner's stages without replicas, under ``pipedream``;
* *planned*: its stages with any numbers of replicas, under ``pipedream``.

The planner is asked as ``pipec.compile`` asks it: under two cost models, for all levels of links and for the
slowest one between any two devices; the simulator decides. All are verified programs, on the links of
``scaling.py``. The last columns are what PipeDream's own cost model says of the plan that is best for it, and
what the paper reports.
"""

import argparse
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from from_graph import PublishedGraph
from pipedream_graph import read_pipedream_graph
from scaling import Case, Work, data_parallel, over_hosts

from pipec.hardware.topology import Topology
from pipec.ir import NO_SYNC, Bucket, Plan, Stage, Stream
from pipec.plan.predictions import simulate_plan, step_seconds
from pipec.plan.sync_spec import with_collective_seconds
from pipec.planner.cost_model import MAX_LOAD, PIPEC, PIPEDREAM
from pipec.planner.operator_graph import OperatorGraph
from pipec.planner.partition import Partition, partition_graph
from pipec.programs.lower_periodic import lower_periodic, num_microbatches_to_lower
from pipec.programs.verify import verify
from pipec.schedules import ASYNCHRONOUS_SCHEDULES

CASES = (
    Case("vgg16", 4, 4, 10, "15-1, 5.28"),
    Case("vgg16", 2, 8, 25, "15-1, 2.98"),
    Case("resnet50", 4, 4, 10, "16, 1.00"),
    Case("resnet50", 2, 8, 25, "16, 1.00"),
    Case("gnmt", 1, 4, 10),
    Case("gnmt", 4, 4, 10),
    Case("gnmt", 2, 8, 25),
    Case("gnmt_large", 1, 4, 10, "1-1-1-1, 1.46"),
    Case("gnmt_large", 4, 4, 10),
    Case("gnmt_large", 2, 8, 25, "straight, 3.14"),
)
"""On hosts of four V100 and 10 Gbit/s, and of eight and 25 Gbit/s (Narayanan et al., SOSP 2019, Table 1).

``gnmt`` has eight LSTM layers and ``gnmt_large`` 16, as the paper's GNMT-8 and GNMT-16.
"""


@dataclass(frozen=True)
class Endless(Work):
    """Work without a flush: a microbatch is a mini-batch. The gradients of a stage travel in one piece."""

    def plan(self) -> Plan:
        plan = super().plan()
        sync_spec = replace(plan.sync_spec, updates=True, stream=self.schedule.stream)
        return replace(plan, num_microbatches=1, sync_spec=sync_spec)

    def seconds(self) -> float:
        """From one mini-batch to the next."""
        plan = self.plan()
        programs = lower_periodic(self.schedule, plan)
        verify(plan, programs)
        carried = self._carried_seconds(plan.links) / self.schedule.num_microbatches
        return max(step_seconds(plan, simulate_plan(plan, programs)), carried)

    def _buckets(self, stage: Stage) -> list[Bucket]:
        ranks, gradients = self.stages[stage.index].devices, tuple(self._completed(stage))
        if len(ranks) < 2 or not gradients:
            return []
        return [with_collective_seconds(Bucket(stage.index, gradients), ranks, self.topology, NO_SYNC)]


def stream_seconds(graph: PublishedGraph, topology: Topology, partition: Partition) -> float:
    """From one mini-batch to the next of a partition under ``pipedream``."""
    pipedream, stages = ASYNCHRONOUS_SCHEDULES["pipedream"], over_hosts(topology, partition)
    replicas = tuple(stage.replicas for stage in stages)
    count = num_microbatches_to_lower(Stream(pipedream.versions), replicas)
    schedule = pipedream.for_batches(replicas, 1, count)
    devices = [device for stage in stages for device in stage.devices]
    return Endless(graph, topology, stages, schedule, devices).seconds()


def fastest(
    graph: PublishedGraph, topology: Topology, max_replicas: int | None = None
) -> tuple[float, Partition]:
    """The partition that is simulated to be the fastest, with its seconds."""
    tried = product((PIPEC, MAX_LOAD), (topology, topology.single_level()))
    plans = [partition_graph(graph, joined, model, max_replicas) for model, joined in tried]
    found = [(stream_seconds(graph, topology, plan), plan) for plan in plans]
    return min(found, key=lambda each: each[0])


def own_model(graph: PublishedGraph, topology: Topology) -> str:
    """The plan that PipeDream's cost model finds best, and by how much it finds it faster than one stage."""
    best = partition_graph(graph, topology, PIPEDREAM)
    alone = partition_graph(in_one_piece(graph), topology, PIPEDREAM)
    return f"{shape(best)}, {alone.seconds / best.seconds:.2f}"


def in_one_piece(graph: OperatorGraph) -> OperatorGraph:
    """All operators as one, which can only be replicated."""
    return OperatorGraph(
        *(["everything"], [sum(graph.seconds)], [sum(graph.parameter_bytes)], [0.0], [0.0], [], [])
    )


def shape(partition: Partition) -> str:
    """The numbers of replicas, such as 15-1."""
    return "-".join(str(stage.replicas) for stage in partition.stages)


def row(case: Case, graph: PublishedGraph) -> str:
    topology = case.topology
    one = data_parallel(graph, topology, 1) / len(topology.devices)
    straight, _ = fastest(graph, topology, max_replicas=1)
    planned, best = fastest(graph, topology)
    cells = [case.profile, f"{case.hosts} x {case.devices}", f"{case.gbits:g}"]
    cells += [f"{1e3 * seconds:.1f}" for seconds in (one, straight, planned)]
    cells += [shape(best), f"{one / planned:.2f}", f"{straight / planned:.2f}"]
    return f"| {' | '.join([*cells, own_model(graph, topology), case.published])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder of pipedream-profiles")
    parser.add_argument("--profiles", nargs="+", choices=sorted({case.profile for case in CASES}))
    args = parser.parse_args()
    times = "data parallelism, ms", "straight, ms", "planned, ms"
    ratios = "data parallelism / planned", "straight / planned"
    columns = ["profile", "hosts x devices", "Gbit/s", *times, "plan", *ratios, "PipeDream's model", "paper"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for case in CASES:
        if case.profile in (args.profiles or case.profile):
            graph = read_pipedream_graph(args.data / "pipedream-profiles" / f"{case.profile}.txt")
            print(row(case, graph), flush=True)


if __name__ == "__main__":
    main()
