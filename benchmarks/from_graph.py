"""The best placement of a published graph as an ordinary plan, so that it is scheduled, simulated and drawn.

A plan has one rank for each stage. The planner may put a stage on r devices that share the microbatches; its
rank then stands for all of them and takes 1/r of the seconds of one device. In the steady state that is as
fast as r devices are. At the ends of a step it is faster, because there a microbatch takes a whole device's
time. The rank holds the microbatches in flight of all r devices, and does not sum its gradients over them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipec.errors import InputError
from pipec.hardware.topology import Topology
from pipec.ir import Link, Mode, Payload, Phase, Plan, Schedule, Stage, StageCost, StageMemory, Value
from pipec.ir.columns import PHASE_CODE, ComputeColumns
from pipec.planner.operator_graph import OperatorGraph
from pipec.planner.partition import Partition, PartitionStage
from pipec.schedules.order_builder import linear_placement


@dataclass(frozen=True, slots=True)
class PublishedGraph(OperatorGraph):
    """A graph whose partition becomes a plan: each operator also has its part of a step in time and memory.

    ``forward_seconds`` is the forward's part of ``seconds``. ``activation_bytes`` is what is saved for a
    microbatch's backward.
    """

    forward_seconds: Sequence[float]
    activation_bytes: Sequence[float]


def plan_from_operator_graph(
    graph: PublishedGraph, topology: Topology, partition: Partition, schedule: Schedule
) -> Plan:
    """Stage k of the partition as stage k on rank k, its operators numbered in the order of the stages.

    A value's shape is its number of bytes. A message takes as long as between those two devices of its
    stages that are joined by the slowest link. Where both stages are on several devices, pairs of them
    exchange messages at the same time: the seconds are divided by the number of pairs.

    Raises:
        InputError: the schedule is not for one stage a rank, or runs the backward in halves.
    """
    check_schedule(schedule, len(partition.stages))
    links, link_seconds = _links(graph, topology, partition.stages)
    return Plan(
        mode=Mode.TRAIN,
        schedule=schedule.name,
        num_microbatches=schedule.num_microbatches,
        microbatch_size=1,
        placement=schedule.placement,
        stages=tuple(_stages(graph, topology, partition.stages)),
        links=links,
        link_seconds=link_seconds,
        link_sender_bytes=(0.0,) * len(links),
        link_saved_bytes=(0.0,) * len(links),
        link_reader_phases=tuple(link.payload.readers[0] for link in links),
    )


def check_schedule(schedule: Schedule, num_stages: int) -> None:
    """Raise InputError unless the schedule runs whole backwards, and stage k on rank k."""
    hint = "take one such as 1f1b or gpipe"
    if schedule.placement != linear_placement(num_stages):
        raise InputError(
            f"schedule {schedule.name!r} has {schedule.num_stages} stages on {schedule.num_ranks} ranks, but "
            f"the graph is planned with one stage on each of {num_stages}; {hint}"
        )
    halves = [PHASE_CODE[Phase.BACKWARD_INPUT], PHASE_CODE[Phase.BACKWARD_WEIGHT]]
    if any(code in ComputeColumns.of(order).phases for order in schedule.orders for code in halves):
        raise InputError(
            f"schedule {schedule.name!r} runs input and weight gradients apart, but the graph's file has the "
            f"time of whole backwards only; {hint}"
        )


def _stages(graph: PublishedGraph, topology: Topology, stages: Sequence[PartitionStage]) -> Iterator[Stage]:
    first = 0
    for index, stage in enumerate(stages):
        last = first + len(stage.operators) - 1
        yield Stage(
            index=index,
            first_operator=first,
            last_operator=last,
            modules=tuple(graph.names[operator] for operator in stage.operators),
            cost=_cost(graph, topology, stage),
        )
        first = last + 1


def _cost(graph: PublishedGraph, topology: Topology, stage: PartitionStage) -> StageCost:
    def total(figures: Sequence[float]) -> float:
        return sum(figures[operator] for operator in stage.operators)

    speed = stage.replicas * min(topology.devices[device].speed for device in stage.devices)
    forward = total(graph.forward_seconds)
    return StageCost(
        seconds={
            Phase.FORWARD: forward / speed,
            Phase.BACKWARD: (total(graph.seconds) - forward) / speed,
        },
        memory=StageMemory(
            weights=total(graph.parameter_bytes) + total(graph.resident_bytes),
            gradients=total(graph.parameter_bytes),
            saved=total(graph.activation_bytes),
        ),
    )


def _links(
    graph: OperatorGraph, topology: Topology, stages: Sequence[PartitionStage]
) -> tuple[tuple[Link, ...], tuple[float, ...]]:
    """One link for all values that go from one stage to another, and its seconds."""
    ways: dict[tuple[int, int], list[tuple[str, float]]] = {}
    for source, target, name, num_bytes in _messages(graph, stages):
        ways.setdefault((source, target), []).append((name, num_bytes))
    links = tuple(
        Link(
            source,
            target,
            Payload.ACTIVATION if source < target else Payload.GRADIENT,
            tuple(Value(name, "uint8", (round(num_bytes),)) for name, num_bytes in values),
        )
        for (source, target), values in ways.items()
    )
    seconds = (
        _link_seconds(topology, stages[source], stages[target], sum(num_bytes for _, num_bytes in values))
        for (source, target), values in ways.items()
    )
    return links, tuple(seconds)


def _messages(
    graph: OperatorGraph, stages: Sequence[PartitionStage]
) -> Iterator[tuple[int, int, str, float]]:
    """Source, target, name and bytes of each value that goes to another stage, and of its gradient."""
    stage_of = {operator: index for index, stage in enumerate(stages) for operator in stage.operators}
    for transfer in graph.transfers:
        source, name = stage_of[transfer.producer], graph.names[transfer.producer]
        for target in sorted({stage_of[operator] for operator in transfer.consumers} - {source}):
            yield source, target, name, transfer.forward_bytes
            if transfer.backward_bytes:
                yield target, source, f"grad_{name}", transfer.backward_bytes


def _link_seconds(
    topology: Topology, source: PartitionStage, target: PartitionStage, num_bytes: float
) -> float:
    ways = {topology.link_between(one, other) for one in source.devices for other in target.devices}
    num_pairs = min(source.replicas, target.replicas)
    return max(way.seconds(num_bytes) for way in ways) / num_pairs
