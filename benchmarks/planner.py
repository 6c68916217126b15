"""The planner on published problems and on long chains, as the Markdown tables of docs/planner.md.

    python benchmarks/planner.py DATA

``DATA`` holds ``pipedream-profiles/NAME.txt``, the profiles of msr-fiddle/pipedream, and
``dnn-partitioning/NAME.json``, graphs of msr-fiddle/dnn-partitioning. What their own optimizers find, and how
long these take, was measured on a machine like ours; None: not finished.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dnn_partitioning import read_dnn_partitioning
from pipedream_graph import read_pipedream_graph
from plan_graph import COST_MODELS

from pipec.hardware.topology import Device, Topology, uniform_topology
from pipec.planner.cost_model import MAX_LOAD, PIPEDREAM, CostModel
from pipec.planner.operator_graph import OperatorGraph, Transfer
from pipec.planner.partition import Partition, partition_graph


@dataclass(frozen=True)
class Profile:
    """A profile on levels of devices, innermost first; ``seconds`` and ``wall_seconds`` of PipeDream."""

    name: str
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    plan: str
    seconds: float | None
    wall_seconds: float | None


PROFILES = (
    Profile("vgg16", (4,), (1e9,), "3-1", 0.205520896, 0.3),
    Profile("vgg16", (16,), (1e9,), "13-2-1", 0.056529767, 0.6),
    Profile("vgg16", (16,), (2.5e9,), "15-1", 0.046320860, None),
    Profile("vgg16", (4, 4), (12e9, 1.25e9), "several tie", 0.066888752, 0.5),
    Profile("alexnet", (4,), (1e9,), "3-1", 0.034217141, 0.01),
    Profile("alexnet", (16,), (1.25e9,), "15-1", 0.015099494, 0.03),
    Profile("resnet50", (16,), (1e9,), "7-6-3", 0.047801345, 3.4),
    Profile("resnet50", (8, 2), (100e9, 3.125e9), "hybrid", 0.031907304, 152),
    Profile("gnmt", (4,), (1e9,), "straight", 0.025868, 0.4),
    Profile("gnmt", (16,), (1e9,), "several tie", 0.019285, 1.4),
    Profile("gnmt_large", (4,), (12e9,), "straight", 0.137129, 11),
    Profile("gnmt_large", (16,), (1e9,), "1 x 11-4-1", 0.058971, 106),
    Profile("gnmt_large", (4, 4), (12e9, 1.25e9), "not finished", None, None),
    Profile("inception_v3", (4,), (1e9,), "not finished", None, None),
    Profile("inception_v3", (16,), (1e9,), "not finished", None, None),
    Profile("inception_v3", (4, 4), (12e9, 1.25e9), "not finished", None, None),
)

NASNETS = tuple(
    Profile(name, (devices,), (1e9,), "not tried", None, None)
    for name in ("nasnetamobile", "nasnetalarge")
    for devices in (4, 16)
)
"""Graphs too wide to list all their downsets; planned if ``DATA`` has them."""

GRAPHS = (
    ("gnmt_training", 107.0044, 38.7),
    ("resnet50_training", 78.6318, 0.3),
    ("bert_l-3_training", 65.3031, 7.4),
)
"""The proved optimum in milliseconds, and the seconds of the exact solver."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder of pipedream-profiles and dnn-partitioning")
    data = parser.parse_args().data
    tables = (profiles(data / "pipedream-profiles"), graphs(data / "dnn-partitioning"), wide(), chains())
    print("\n\n".join("\n".join(table) for table in tables))


def profiles(folder: Path) -> Iterator[str]:
    yield from heading(
        "profile", "devices, bytes/s", "PipeDream", "s", "found in s", "pipec", "s", "proved", "found in s"
    )
    for profile in (*PROFILES, *(each for each in NASNETS if (folder / f"{each.name}.txt").exists())):
        graph = read_pipedream_graph(folder / f"{profile.name}.txt")
        plan, wall = timed(graph, uniform_topology(profile.sizes, profile.rates), PIPEDREAM)
        assert profile.seconds is None or plan.seconds <= profile.seconds * (1 + 1e-6)
        levels = (
            f"{' x '.join(map(str, profile.sizes))}, {' and '.join(f'{rate:g}' for rate in profile.rates)}"
        )
        theirs = (profile.plan, figure(profile.seconds, 9), figure(profile.wall_seconds, 2))
        yield row(
            profile.name, levels, *theirs, shape(plan), f"{plan.seconds:.9f}", proof(plan), f"{wall:.2f}"
        )


def graphs(folder: Path) -> Iterator[str]:
    yield from heading("graph", "proved optimum, ms", "their exact solver, s", "pipec, ms", "found in s")
    for name, optimum, theirs in GRAPHS:
        problem = read_dnn_partitioning(folder / f"{name}.json")
        plan, wall = timed(problem.graph, problem.topology, MAX_LOAD, 1)
        assert math.isclose(plan.seconds * 1000, optimum, rel_tol=1e-6)
        yield row(name, str(optimum), str(theirs), f"{plan.seconds * 1000:.4f}", f"{wall:.2f}")


@dataclass(frozen=True)
class Cells:
    """Cells one after the other, each of so many branches of equally many operators of random costs.

    Odd branches read the cell before, even ones the cell before that one, as in NASNet-A.
    """

    cells: int
    branches: int
    length: int
    devices: int


WIDE = tuple(Cells(cells, 5, 8, devices) for cells in (21, 29) for devices in (4, 16))


def wide() -> Iterator[str]:
    yield from heading("operators", "cells", "devices", "pipec", "s", "proved", "found in s")
    for case in WIDE:
        graph = cells(case)
        plan, wall = timed(graph, uniform_topology([case.devices], [1e9]), PIPEDREAM)
        size = f"{len(graph.names):,}", f"{case.cells} of {case.branches} x {case.length}", str(case.devices)
        yield row(*size, shape(plan), f"{plan.seconds:.9f}", proof(plan), f"{wall:.2f}")


def cells(case: Cells) -> OperatorGraph:
    """Operator 0 is read by the first cell; the last operator of a cell joins its branches."""
    draw, size = random.Random(0), case.branches * case.length + 1
    edges, joins = [], [0, 0]
    for first in range(1, case.cells * size, size):
        for branch in range(case.branches):
            begin = first + branch * case.length
            edges += pairwise((joins[-1 - branch % 2], *range(begin, begin + case.length), first + size - 1))
        joins.append(first + size - 1)
    operators = range(case.cells * size + 1)
    readers = {op: tuple(v for u, v in edges if u == op) for op in operators}
    sizes = [draw.random() * 1e7 for _ in operators]
    return OperatorGraph(
        names=[f"operator {op}" for op in operators],
        seconds=[draw.random() * 1e-3 for _ in operators],
        parameter_bytes=[draw.random() * 1e5 for _ in operators],
        resident_bytes=[0.0] * len(operators),
        saved_bytes=[0.0] * len(operators),
        transfers=[Transfer(op, readers[op], sizes[op], sizes[op]) for op in operators if readers[op]],
        before=edges,
    )


@dataclass(frozen=True)
class Chain:
    """Operators of random costs in one line, for 64 devices and links of 1e9 bytes per second.

    ``skip``: every tenth value is also read so many operators later. ``memory_bytes``: of a device, where 1
    is what an average stage in the middle of 64 holds.
    """

    operators: int
    model: str
    replicas: int | None = 1
    skip: int = 0
    memory_bytes: float = math.inf


CHAINS = (
    Chain(1000, "pipec", None),
    Chain(1000, "pipedream", None),
    Chain(1000, "pipec", None, skip=10),
    Chain(1000, "pipec", None, memory_bytes=1.2),
    Chain(1000, "pipec", memory_bytes=1.2),
    Chain(100_000, "pipec"),
    Chain(100_000, "pipedream"),
    Chain(100_000, "pipec", skip=10),
    Chain(100_000, "pipec", skip=10, memory_bytes=1.2),
    Chain(100_000, "pipec", None),
)


def chains() -> Iterator[str]:
    yield from heading(
        "operators", "replicas", "cost model", "skips", "memory", "stages", "proved", "found in s"
    )
    for case in CHAINS:
        graph = chain(case)
        topology = uniform_topology(
            [64], [1e9], Device(memory_bytes=case.memory_bytes * average_bytes(graph))
        )
        plan, wall = timed(graph, topology, COST_MODELS[case.model], case.replicas)
        yield row(
            f"{case.operators:,}",
            "any" if case.replicas is None else str(case.replicas),
            case.model,
            "yes" if case.skip else "no",
            "as needed" if case.memory_bytes == math.inf else f"{case.memory_bytes} of an average stage's",
            str(len(plan.stages)),
            proof(plan),
            f"{wall:.2f}",
        )


def chain(case: Chain) -> OperatorGraph:
    draw, operators = random.Random(0), range(case.operators)
    seconds, parameters, sizes, saved = ([draw.random() for _ in operators] for _ in range(4))
    readers = [
        (k + 1, k + case.skip) if case.skip and k % 10 == 0 and k + case.skip < case.operators else (k + 1,)
        for k in operators
    ]
    return OperatorGraph(
        names=[f"operator {k}" for k in operators],
        seconds=[each * 1e-3 for each in seconds],
        parameter_bytes=[each * 1e6 for each in parameters],
        resident_bytes=[each * 2e6 for each in parameters],
        saved_bytes=[each * 1e5 for each in saved],
        transfers=[Transfer(k, readers[k], sizes[k] * 1e6, sizes[k] * 1e6) for k in operators[:-1]],
        before=[(k, k + 1) for k in operators[:-1]],
    )


def average_bytes(graph: OperatorGraph) -> float:
    """Of a stage in the middle of 64, with 32 microbatches in flight."""
    return (sum(graph.resident_bytes) + 32 * sum(graph.saved_bytes)) / 64


def timed(
    graph: OperatorGraph, topology: Topology, model: CostModel, max_replicas: int | None = None
) -> tuple[Partition, float]:
    started = time.perf_counter()
    placement = partition_graph(graph, topology, model, max_replicas)
    return placement, time.perf_counter() - started


def shape(placement: Partition) -> str:
    return "-".join(str(stage.replicas) for stage in placement.stages)


def proof(placement: Partition) -> str:
    """Whether the plan is the best there can be, and if not how much better one could be."""
    if placement.is_optimal:
        return "yes"
    return f"to {placement.seconds / placement.lower_bound_seconds - 1:.1%}"


def figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def heading(*cells: str) -> tuple[str, str]:
    return row(*cells), row(*("---" for _ in cells))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
