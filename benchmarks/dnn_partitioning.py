"""Read the training graphs of msr-fiddle/dnn-partitioning: JSON, with separate backward nodes.

Tarnawski et al., Efficient Algorithms for Device Partition of DNN Graph Operators (NeurIPS 2020). Nodes of
one ``colorClass``, a forward node and its backward, are on one device: together they are an operator here.
A node without one is an operator by itself. The file gives the cost of an edge in milliseconds rather than
bytes, so values are sized in seconds and links carry one "byte" per second.

Their cost model is ``MAX_LOAD`` (see ``pipec.planner.cost_model``). A CPU is a slow device here. Its speed is
that of the operator that suits it least, and it pays for its links. Their solver charges an operator on a CPU
its ``cpuLatency`` and no links. So a plan of ours is never better than theirs, and where it is as good, it is
the optimum of both.

The forward nodes of a device are contiguous: an edge between two of them orders their operators. Backward
nodes follow their forwards; an edge between two orders their operators the other way around if one of them
has no forward. Operators ordered both ways are on one device.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from from_graph import PublishedGraph
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from pipec.errors import DAMAGED_DATA_ERRORS, PlanError
from pipec.hardware.topology import Device, Level, Topology
from pipec.ir.argument_checks import MOST_RANKS, check_arguments, integer_between
from pipec.planner.operator_graph import Transfer

Node = Mapping[str, Any]

Colour = tuple[str, int]

Edge = tuple[int, int, float]
"""The source, the target, and the seconds it takes to move the source's output."""


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """The problem of a file, to be planned without replicas. ``nodes[op]`` are the ids of an operator."""

    graph: PublishedGraph
    topology: Topology
    nodes: tuple[tuple[str, ...], ...]


def read_dnn_partitioning(path: Path) -> DevicePlacement:
    """PlanError if the file is not of this format."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return parse_dnn_partitioning(facts)
    except DAMAGED_DATA_ERRORS as error:
        raise PlanError(
            f"{path} is not a dnn-partitioning graph: {error!r}. Expected JSON with maxFPGAs, "
            f"maxSizePerFPGA, maxCPUs, nodes (id, fpgaLatency, cpuLatency, size, isBackwardNode) and "
            f"edges (sourceId, destId, cost)"
        ) from error


def parse_dnn_partitioning(facts: Mapping[str, Any]) -> DevicePlacement:
    nodes: dict[int, Node] = {node["id"]: node for node in facts["nodes"]}
    edges = [(edge["sourceId"], edge["destId"], edge["cost"] / 1000) for edge in facts["edges"]]
    operator_of, before = _operators(nodes, edges)
    num_operators = max(operator_of.values(), default=-1) + 1
    names = [""] * num_operators
    seconds, forward, size = ([0.0] * num_operators for _ in range(3))
    for key, node in nodes.items():
        op = operator_of[key]
        names[op] = names[op] or str(node.get("name", key))
        seconds[op] += node["fpgaLatency"] / 1000
        forward[op] += 0.0 if node["isBackwardNode"] else node["fpgaLatency"] / 1000
        size[op] += node["size"]
    idle = [0.0] * num_operators
    graph = PublishedGraph(
        names=names,
        seconds=seconds,
        parameter_bytes=idle,
        resident_bytes=size,
        saved_bytes=idle,
        transfers=_transfers(edges, operator_of),
        before=before,
        forward_seconds=forward,
        activation_bytes=idle,
    )
    members = [[str(key) for key in nodes if operator_of[key] == op] for op in range(num_operators)]
    return DevicePlacement(graph, _topology(facts), tuple(map(tuple, members)))


def _topology(facts: Mapping[str, Any]) -> Topology:
    check_arguments(
        {"maxFPGAs": integer_between(0, MOST_RANKS), "maxCPUs": integer_between(0, MOST_RANKS)}, facts
    )
    accelerators = (Device(memory_bytes=facts["maxSizePerFPGA"]),) * facts["maxFPGAs"]
    speed = min(
        (node["fpgaLatency"] / node["cpuLatency"] for node in facts["nodes"] if node["cpuLatency"]),
        default=1.0,
    )
    cpus = (Device(speed=speed),) * (facts["maxCPUs"] if speed > 0 else 0)
    devices = accelerators + cpus
    return Topology(devices, (Level(len(devices), 1.0),))


def _operators(
    nodes: Mapping[int, Node], edges: Sequence[Edge]
) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """The operator of each node, and which come before which.

    An operator is a colour, or several that must share a device.
    """
    colour = {
        key: ("colour", node["colorClass"]) if "colorClass" in node else ("node", key)
        for key, node in nodes.items()
    }
    index = {each: k for k, each in enumerate(dict.fromkeys(colour.values()))}
    order = np.array([(index[u], index[v]) for u, v in _order(nodes, edges, colour)], dtype=np.intp)
    tails, heads = order.reshape(-1, 2).T
    together = csr_array((np.ones(len(order)), (tails, heads)), shape=(len(index), len(index)))
    _, components = connected_components(together, connection="strong")
    numbers = {component: number for number, component in enumerate(dict.fromkeys(components.tolist()))}
    operator_of = [numbers[component] for component in components.tolist()]
    before = {(operator_of[u], operator_of[v]) for u, v in order.tolist()}
    pairs = sorted((u, v) for u, v in before if u != v)
    return {key: operator_of[index[colour[key]]] for key in nodes}, pairs


def _order(
    nodes: Mapping[int, Node], edges: Sequence[Edge], colour: Mapping[int, Colour]
) -> Iterator[tuple[Colour, Colour]]:
    """Pairs of colours: no stage has the first after the second."""
    with_forward = {colour[key] for key, node in nodes.items() if not node["isBackwardNode"]}
    for source, target, _ in edges:
        ends = (colour[source], colour[target])
        if not (nodes[source]["isBackwardNode"] or nodes[target]["isBackwardNode"]):
            yield ends
        elif nodes[source]["isBackwardNode"] and not with_forward.issuperset(ends):
            yield ends[::-1]


def _transfers(edges: Sequence[Edge], operator_of: Mapping[int, int]) -> list[Transfer]:
    cost: dict[int, float] = {}
    readers: dict[int, set[int]] = {}
    for source, target, seconds in edges:
        cost[source] = seconds
        readers.setdefault(source, set()).add(operator_of[target])
    return [
        Transfer(operator_of[source], tuple(sorted(consumers)), cost[source], 0)
        for source, consumers in readers.items()
        if consumers != {operator_of[source]}
    ]
