"""Scaling on many hosts, simulated from published profiles: Horovod's measure, and what a hybrid gains.

    python benchmarks/scaling.py DATA

``DATA`` holds ``pipedream-profiles/NAME.txt``, the profiles of msr-fiddle/pipedream: V100, 128 rows a device.
Scaling efficiency is the throughput on n devices over n times that of one (Sergeev and Del Balso, 2018). A
step is n mini-batches, one for each device. What is simulated are verified programs with their reduces.

Data parallelism is that of one stage, which sums gradients between the parts of its backward, and that of
``SEGMENTS`` stages on every rank, each of which sums its own while the backward of those before it goes on.
No way to overlap is better than the longer of compute and communication.

The hybrid is the planner's. It runs 1F1B in round robin, with a flush after each step, on as many
microbatches as it is fastest with. A host has one link for all its devices: a message between hosts has a
device's share of it, and no step is shorter than what the busiest link has to carry.
"""

import argparse
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

from from_graph import PublishedGraph, plan_from_operator_graph
from pipedream_graph import read_pipedream_graph

from pipec.hardware.collective_costs import all_reduce_seconds, fastest_num_hosts
from pipec.hardware.topology import Device, Level, Topology
from pipec.ir import (
    NO_SYNC,
    Bucket,
    Link,
    Phase,
    Placement,
    Plan,
    Schedule,
    Stage,
    SyncSpec,
    Value,
    rank_of,
)
from pipec.ir.text_format import value_bytes
from pipec.plan.buckets import GradientTimes, choose_buckets
from pipec.plan.predictions import simulate_plan
from pipec.plan.sync_spec import with_collective_seconds
from pipec.planner.cost_model import PIPEC
from pipec.planner.operator_graph import topological_order
from pipec.planner.partition import Partition, PartitionStage, partition_graph
from pipec.programs.lower import lower
from pipec.programs.verify import verify
from pipec.schedules import looped_bfs, one_f_one_b
from pipec.schedules.replicated import replicate_schedule, round_robin

SEGMENTS = 16
PARTS = (1, 2, 4, 8)
"""Into how many microbatches a mini-batch is divided, the seconds in proportion."""

INSIDE = (12e9, 5e-6)
"""Bytes per second and latency of the links inside a host."""

PART_SECONDS = 5e-5
"""What one more bucket takes its rank."""
LATENCY = 30e-6
"""Of the links between hosts."""


@dataclass(frozen=True)
class Case:
    """A profile on hosts of devices, and what was ``published`` for such hardware, if anything."""

    profile: str
    hosts: int
    devices: int
    gbits: float
    published: str = ""

    @property
    def topology(self) -> Topology:
        levels = Level(self.devices, *INSIDE), Level(self.hosts, self.gbits * 1e9 / 8, LATENCY)
        return Topology((Device(),) * (self.hosts * self.devices), levels)


PROFILES = ("vgg16", "resnet50", "inception_v3")

CASES = (
    *(Case(profile, 8, 8, gbits) for profile in PROFILES for gbits in (10, 25, 100)),
    Case("vgg16", 32, 4, 25, "Horovod 79%"),
    Case("resnet50", 32, 4, 25, "Horovod 90% (ResNet-101)"),
    Case("inception_v3", 32, 4, 25, "Horovod 90%"),
    Case("vgg16", 4, 4, 10, "PipeDream 5.28x"),
    Case("vgg16", 2, 8, 25, "PipeDream 2.98x"),
    Case("resnet50", 4, 4, 10, "PipeDream 1x"),
)


@dataclass(frozen=True)
class Work:
    """Stages of a profile on the devices of a topology: a mini-batch is ``parts`` microbatches.

    ``devices[r]`` is that of rank r, and ``schedule`` is one of its stages.
    """

    graph: PublishedGraph
    topology: Topology
    stages: Sequence[PartitionStage]
    schedule: Schedule
    devices: Sequence[int]
    parts: int = 1

    @property
    def placement(self) -> Placement:
        return self.schedule.placement

    def plan(self) -> Plan:
        """The plan of the stages, each on one rank as fast as all of its own, with ranks for all of them."""
        straight = one_f_one_b(len(self.stages), 1)
        merged = plan_from_operator_graph(
            self.graph, self.topology, Partition(tuple(self.stages), 0.0), straight
        )
        stages, buckets = [], list[Bucket]()
        for stage in map(self._with_replicas, merged.stages):
            own = self._buckets(stage)
            names = tuple(name for bucket in own for name in bucket.names)
            stages.append(replace(stage, parameters=names, segments=self._parts(stage, own)))
            buckets += own
        return replace(
            merged,
            num_microbatches=self.schedule.num_microbatches,
            placement=self.placement,
            stages=tuple(stages),
            link_seconds=tuple(map(self._message_seconds, merged.links)),
            sync_spec=SyncSpec(buckets=tuple(buckets)),
        )

    def seconds(self) -> float:
        """Of the step, simulated from the programs, which are verified."""
        plan = self.plan()
        programs = lower(self.schedule, plan)
        verify(plan, programs)
        return max(simulate_plan(plan, programs).makespan, self._carried_seconds(plan.links))

    def _with_replicas(self, stage: Stage) -> Stage:
        """The stage as one of its devices runs it on a microbatch."""
        times = self.stages[stage.index].replicas / self.parts
        seconds = {phase: time * times for phase, time in stage.cost.seconds.items()}
        return replace(stage, cost=replace(stage.cost, seconds=seconds))

    def _completed(self, stage: Stage) -> dict[Value, float]:
        """The gradients of a stage, each with the share of the backward after which it is complete."""
        graph, found, share = self.graph, dict[Value, float](), 0.0
        operators = self.stages[stage.index].operators
        seconds = {op: graph.seconds[op] - graph.forward_seconds[op] for op in operators}
        for op in reversed(operators):
            share += seconds[op] / (sum(seconds.values()) or 1.0)
            if size := round(graph.parameter_bytes[op]):
                found[Value(graph.names[op], "uint8", (size,))] = share
        return found

    def _buckets(self, stage: Stage) -> list[Bucket]:
        ranks, completed = self.stages[stage.index].devices, self._completed(stage)
        if len(ranks) < 2 or not completed:
            return []
        price = functools.partial(
            with_collective_seconds, ranks=ranks, topology=self.topology, requested=NO_SYNC
        )
        seconds = (stage.cost.seconds[phase] for phase in (Phase.FORWARD, Phase.BACKWARD))
        gradients = GradientTimes([*completed], [*completed.values()], *seconds)
        groups = choose_buckets(gradients, NO_SYNC, price, PART_SECONDS)
        return [price(Bucket(stage.index, group, segment=part)) for part, group in enumerate(groups)]

    def _parts(self, stage: Stage, buckets: Sequence[Bucket]) -> dict[Phase, tuple[float, ...]]:
        """The shares of the backward that end with the last gradient of each bucket."""
        completed = self._completed(stage)
        ends = [completed[bucket.parameters[-1]] for bucket in buckets[:-1]]
        shares = tuple(end - start for start, end in pairwise([0.0, *ends, 1.0]))
        return {Phase.BACKWARD: shares} if len(shares) > 1 else {}

    def _message_seconds(self, link: Link) -> float:
        """Of a microbatch, between those of its ranks that are farthest apart."""
        ways = [self.topology.link_between(one, other) for one, other in self._pairs(link) if one != other]
        if not ways:
            return 0.0
        slowest = max(ways, key=lambda way: way.seconds(self._bytes(link)))
        shared = 1
        if slowest == self.topology.levels[-1].link:
            hosts = [Counter(map(self._host, self.stages[end].devices)) for end in (link.source, link.target)]
            shared = max(max(count.values()) for count in hosts)
        return slowest.seconds(self._bytes(link) * shared)

    def _carried_seconds(self, links: Sequence[Link]) -> float:
        """How long the busiest link of a host carries the messages of a step, in one direction."""
        carried: Counter[tuple[str, int]] = Counter()
        for link in links:
            for one, other in self._pairs(link):
                source, target = self._host(one), self._host(other)
                if source != target:
                    carried["out", source] += self._bytes(link)
                    carried["in", target] += self._bytes(link)
        return max(carried.values(), default=0.0) / self.topology.levels[-1].bytes_per_second

    def _pairs(self, link: Link) -> Iterator[tuple[int, int]]:
        """The devices between which each microbatch of a step goes."""
        for microbatch in range(self.schedule.num_microbatches):
            ranks = (rank_of(self.placement, stage, microbatch) for stage in (link.source, link.target))
            source, target = (self.devices[rank] for rank in ranks)
            yield source, target

    def _bytes(self, link: Link) -> float:
        return sum(value_bytes(value, {}) for value in link.values) / self.parts

    def _host(self, device: int) -> int:
        return device // self.topology.levels[0].size


def data_parallel(graph: PublishedGraph, topology: Topology, segments: int) -> float:
    """Seconds of a step with so many stages, each of them on every device."""
    devices = tuple(range(len(topology.devices)))
    stages = [PartitionStage(ops, devices, 0.0, 0.0, 0.0, 0.0, 1) for ops in divided(graph, segments)]
    one = functools.partial(looped_bfs, 1, num_chunks=len(stages))
    return Work(
        graph, topology, stages, replicate_schedule(one, len(devices), len(devices)), devices
    ).seconds()


def divided(graph: PublishedGraph, segments: int) -> list[tuple[int, ...]]:
    """Consecutive operators that take about as long as the others, in the order in which they run."""
    order = topological_order(graph)
    ends = accumulate(graph.seconds[op] for op in order)
    parts: dict[int, list[int]] = {}
    for op, end in zip(order, ends, strict=True):
        parts.setdefault(min(int(segments * end / sum(graph.seconds)), segments - 1), []).append(op)
    return [tuple(part) for part in parts.values()]


def hybrid(graph: PublishedGraph, topology: Topology, partition: Partition) -> float:
    """Seconds of a step of the partition with the best number of microbatches."""
    stages = over_hosts(topology, partition)
    replicas = [stage.replicas for stage in stages]
    devices = [device for stage in stages for device in stage.devices]
    return min(
        Work(
            graph, topology, stages, round_robin(parts * len(topology.devices), replicas), devices, parts
        ).seconds()
        for parts in PARTS
    )


def over_hosts(topology: Topology, partition: Partition) -> list[PartitionStage]:
    """The stages, with replicas in an order in which consecutive microbatches go to different hosts."""
    size = topology.levels[0].size
    return [
        replace(stage, devices=tuple(sorted(stage.devices, key=lambda device: (device % size, device))))
        for stage in partition.stages
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="the folder of pipedream-profiles")
    folder = parser.parse_args().data / "pipedream-profiles"
    names = "profile", "hosts x devices", "Gbit/s", "one stage", "16 stages", "at best"
    columns = [*names, "hybrid", "efficiency", "/ one stage", "/ 16 stages", "published"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for case in CASES:
        print(row(case, read_pipedream_graph(folder / f"{case.profile}.txt")), flush=True)


def row(case: Case, graph: PublishedGraph) -> str:
    topology, one = case.topology, sum(graph.seconds)
    after, beside = (data_parallel(graph, topology, segments) for segments in (1, SEGMENTS))
    everywhere, num_bytes = range(len(topology.devices)), sum(graph.parameter_bytes)
    hosts = fastest_num_hosts(topology, everywhere, num_bytes)
    sums = all_reduce_seconds(topology, everywhere, num_bytes, hosts)
    partition = partition_graph(graph, topology, replace(PIPEC, step_microbatches=len(topology.devices)))
    cells = [case.profile, f"{case.hosts} x {case.devices}", f"{case.gbits:g}"]
    cells += [f"{one / seconds:.0%}" for seconds in (after, beside, max(one, sums))]
    if len(partition.stages) > 1:
        seconds = hybrid(graph, topology, partition)
        shape = "-".join(str(stage.replicas) for stage in partition.stages)
        cells += [shape, f"{one / seconds:.0%}", f"{after / seconds:.2f}", f"{beside / seconds:.2f}"]
    else:
        cells += ["data parallelism", "", "", ""]
    cells.append(case.published)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
