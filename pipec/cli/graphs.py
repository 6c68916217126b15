"""``pipec plan`` of a published graph with costs instead of a model: where each operator goes, no code."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pipec.cli.output import show_json
from pipec.errors import InputError
from pipec.ir.text import format_seconds

if TYPE_CHECKING:
    from pipec.hardware.topology import Topology
    from pipec.planner.operator_graph import OperatorGraph
    from pipec.planner.placement import Partition, PlacedStage


@dataclass(frozen=True)
class GraphOptions:
    """What ``pipec plan`` was given; ``devices`` and ``bandwidth`` list levels from the inside out."""

    pipedream_graph: Path | None
    dnn_partitioning: Path | None
    devices: str | None
    bandwidth: str | None
    topology: Path | None
    cost_model: str | None


@dataclass(frozen=True)
class _Problem:
    """``nodes[op]`` are the file's names of what the graph's operator ``op`` stands for."""

    graph: "OperatorGraph"
    topology: "Topology"
    cost_model: str
    max_replicas: int | None
    nodes: Sequence[Sequence[str]]


def plan_graph(options: GraphOptions, as_json: bool) -> None:
    """Print the best plan of the graph in a file."""
    from pipec.planner.cost_model import COST_MODELS
    from pipec.planner.placement import place

    problem = _problem(options)
    if problem.cost_model not in COST_MODELS:
        raise InputError(f"--cost-model is {problem.cost_model!r}; expected {' or '.join(COST_MODELS)}")
    started = time.perf_counter()
    placement = place(problem.graph, problem.topology, COST_MODELS[problem.cost_model], problem.max_replicas)
    planning_seconds = time.perf_counter() - started
    if as_json:
        show_json(_facts(placement, problem.nodes, planning_seconds))
    else:
        typer.echo("\n".join(_lines(placement, problem.nodes, planning_seconds)))


def _problem(options: GraphOptions) -> _Problem:
    if options.dnn_partitioning is not None:
        return _of_dnn_partitioning(options, options.dnn_partitioning)
    assert options.pipedream_graph is not None
    from pipec.planner.pipedream_graph import read_pipedream_graph

    topology = _topology(options)
    graph = read_pipedream_graph(options.pipedream_graph)
    cost_model = options.cost_model or "pipedream"
    return _Problem(graph, topology, cost_model, None, [(name,) for name in graph.names])


def _of_dnn_partitioning(options: GraphOptions, path: Path) -> _Problem:
    given = (
        options.pipedream_graph,
        options.devices,
        options.bandwidth,
        options.topology,
        options.cost_model,
    )
    if any(option is not None for option in given):
        raise InputError(
            "--dnn-partitioning goes without a PipeDream graph, devices, bandwidth, topology and cost model: "
            "its file says all that is to know"
        )
    from pipec.planner.dnn_partitioning import read_dnn_partitioning

    problem = read_dnn_partitioning(path)
    return _Problem(problem.graph, problem.topology, "max-load", 1, problem.nodes)


def _topology(options: GraphOptions) -> "Topology":
    from pipec.hardware.topology import read_topology, uniform

    if options.topology is not None and options.devices is options.bandwidth is None:
        return read_topology(options.topology)
    if options.devices is None or options.bandwidth is None or options.topology is not None:
        raise InputError("a PipeDream graph needs --devices and --bandwidth, or --topology alone")
    try:
        sizes = [int(size) for size in options.devices.split("x")]
        rates = [float(rate) for rate in options.bandwidth.split(",")]
    except ValueError as error:
        raise InputError(
            f"--devices is {options.devices!r} and --bandwidth {options.bandwidth!r}; expected numbers such "
            f"as 16 and 1e9, or one of each a level, innermost first, such as 4x4 and 12e9,1.25e9"
        ) from error
    return uniform(sizes, rates)


def _facts(
    placement: "Partition", nodes: Sequence[Sequence[str]], planning_seconds: float
) -> dict[str, object]:
    stages = [
        {
            "replicas": stage.replicas,
            "operators": [name for op in stage.operators for name in nodes[op]],
            "seconds": stage.seconds,
            "communication_seconds": stage.communication_seconds,
            "devices": stage.devices,
        }
        for stage in placement.stages
    ]
    return {
        "seconds": placement.seconds,
        "stages": stages,
        "planning_seconds": planning_seconds,
        "least_seconds": placement.least_seconds,
    }


def _bottleneck(stage: "PlacedStage", index: int) -> str:
    """Why the step is not faster: links and all-reduce, an operator that cannot be divided, or the work."""
    spent = format_seconds(stage.communication_seconds)
    if 2 * stage.communication_seconds > stage.seconds:
        return f"stage {index} bounds the step, most of all by {spent} of links and all-reduce"
    alone = ", all in one operator" if len(stage.operators) == 1 else ""
    return f"stage {index} bounds the step by its operators{alone}; links and all-reduce take {spent}"


def _lines(placement: "Partition", nodes: Sequence[Sequence[str]], planning_seconds: float) -> Iterator[str]:
    yield (
        f"{len(placement.stages)} stages, the slowest {format_seconds(placement.seconds)}, "
        f"planned in {format_seconds(planning_seconds)}"
    )
    for index, stage in enumerate(placement.stages):
        names = [name for op in stage.operators for name in nodes[op]]
        yield (
            f"stage {index}: {stage.replicas} replicas, {format_seconds(stage.seconds)}, "
            f"{len(names)} operators, {names[0]} to {names[-1]}"
        )
    yield _bottleneck(placement.stages[placement.slowest], placement.slowest)
    if not placement.is_optimal:
        yield f"not proved optimal: no plan takes less than {format_seconds(placement.least_seconds)}"
