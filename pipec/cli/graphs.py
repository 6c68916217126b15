"""``pipec plan-graph``: the best plan of a published graph with costs, simulated and drawn like a model's."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipec.cli.drawing import check_output, draw, show_drawn
from pipec.cli.options import Drawing, Json, ScheduleName, TopologyFile
from pipec.cli.output import plan_facts, say, show_json
from pipec.errors import InputError
from pipec.ir.arguments import MOST_MICROBATCHES
from pipec.ir.text import format_seconds

if TYPE_CHECKING:
    from pipec.hardware.topology import Topology
    from pipec.ir import Plan, Program, Schedule
    from pipec.planner.operator_graph import OperatorGraph
    from pipec.planner.placement import Partition, PlacedStage
    from pipec.viz import Step


class Format(StrEnum):
    """Whose graph a file holds."""

    PIPEDREAM = "pipedream"
    DNN_PARTITIONING = "dnn-partitioning"


class CostModelName(StrEnum):
    """What the planner takes for the seconds of a stage."""

    PIPEDREAM = "pipedream"
    PIPEC = "pipec"
    MAX_LOAD = "max-load"


def plan_graph(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="A profile of PipeDream, a graph.txt, or a graph of dnn-partitioning, a JSON file.",
        ),
    ],
    format: Annotated[
        Format | None, typer.Option("--format", help="Default: JSON is a graph of dnn-partitioning.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(help="How many, or by level, innermost first, such as 4x4. A JSON file has its own."),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bytes per second of each level, such as 12e9,1.25e9.")
    ] = None,
    topology: TopologyFile = None,
    cost_model: Annotated[
        CostModelName | None, typer.Option(help="What the planner minimises; of a profile, pipedream.")
    ] = None,
    schedule: ScheduleName = "1f1b",
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_MICROBATCHES, help="How many a step has; default: four a stage."),
    ] = None,
    output: Drawing = None,
    as_json: Json = False,
) -> None:
    """Plan a published graph: which operators form a stage, on how many devices; and simulate its step.

    The planner minimises the slowest stage under its cost model. The table shows that plan under the
    schedule, as the simulator plays it: messages travel beside operators. A stage on r devices is one rank
    there, r times as fast, and does not sum its gradients over them.

    JSON keys: those of pipec plan; and of the planner, seconds of the slowest stage; stages, each with
    replicas, operators, seconds, communication_seconds, devices; planning_seconds; least_seconds, which no
    plan is below; cost_model.
    """
    check_output(output)
    problem = _problem(file, format, _Hardware(devices, bandwidth, topology, cost_model))
    planned = _planned(problem, schedule, microbatches)
    step = _step(planned)
    draw([step], output)
    if as_json:
        show_json({**_facts(problem, planned), **plan_facts(planned.plan, planned.programs)})
    else:
        say("\n".join([*_lines(problem, planned, step), ""]))
        if output is not None:
            show_drawn([step], output)


@dataclass(frozen=True)
class _Hardware:
    """The options that say what a graph is planned for; a dnn-partitioning file says it itself."""

    devices: str | None
    bandwidth: str | None
    topology: Path | None
    cost_model: str | None


@dataclass(frozen=True)
class _Problem:
    """``nodes[k]`` are the names that the file gives to what is operator k of the graph.

    ``unknown`` says what the file does not tell, for the reader of the plan's table.
    """

    graph: "OperatorGraph"
    topology: "Topology"
    cost_model: str
    max_replicas: int | None
    nodes: Sequence[Sequence[str]]
    unknown: str = ""


@dataclass(frozen=True)
class _Planned:
    """The planner's partition, and the plan with its programs that came of it."""

    partition: "Partition"
    planning_seconds: float
    plan: "Plan"
    programs: tuple["Program", ...]


def _problem(file: Path, format: Format | None, hardware: _Hardware) -> _Problem:
    if (format or _format_of(file)) is Format.PIPEDREAM:
        from pipec.planner.pipedream_graph import read_pipedream_graph

        topology = _topology(hardware)
        graph = read_pipedream_graph(file)
        cost_model = hardware.cost_model or CostModelName.PIPEDREAM
        return _Problem(graph, topology, cost_model, None, [(name,) for name in graph.names])
    if hardware != _Hardware(None, None, None, None):
        raise InputError(
            f"{file.name} is a graph of dnn-partitioning, which says all that is to know: leave out "
            "--devices, --bandwidth, --topology and --cost-model"
        )
    from pipec.planner.dnn_partitioning import read_dnn_partitioning

    problem = read_dnn_partitioning(file)
    unknown = (
        "the file gives the seconds of a message and all memory of an operator as one sum: sends and saves "
        "are shown as 0, all memory as weights"
    )
    return _Problem(problem.graph, problem.topology, CostModelName.MAX_LOAD, 1, problem.nodes, unknown)


def _format_of(file: Path) -> Format:
    """A graph of dnn-partitioning is JSON; no line of a profile begins with a brace."""
    begin = file.read_text(encoding="utf-8", errors="replace").lstrip()[:1]
    return Format.DNN_PARTITIONING if begin == "{" else Format.PIPEDREAM


def _topology(hardware: _Hardware) -> "Topology":
    from pipec.hardware.topology import read_topology, uniform

    devices, bandwidth = hardware.devices, hardware.bandwidth
    if hardware.topology is not None and devices is bandwidth is None:
        return read_topology(hardware.topology)
    if devices is None or bandwidth is None or hardware.topology is not None:
        raise InputError("a profile of PipeDream needs --devices and --bandwidth, or --topology alone")
    try:
        sizes = [int(size) for size in devices.split("x")]
        rates = [float(rate) for rate in bandwidth.split(",")]
    except ValueError as error:
        raise InputError(
            f"--devices is {devices!r} and --bandwidth {bandwidth!r}; expected numbers such as 16 and 1e9, "
            f"or one of each a level, innermost first, such as 4x4 and 12e9,1.25e9"
        ) from error
    return uniform(sizes, rates)


def _planned(problem: _Problem, schedule: str, num_microbatches: int | None) -> _Planned:
    from pipec.plan.from_graph import plan_from_graph
    from pipec.planner.cost_model import COST_MODELS
    from pipec.planner.placement import place
    from pipec.programs.lower import lower
    from pipec.programs.verify import verify_programs

    started = time.perf_counter()
    model = COST_MODELS[problem.cost_model]
    partition = place(problem.graph, problem.topology, model, problem.max_replicas)
    seconds = time.perf_counter() - started
    num_stages = len(partition.stages)
    cells = _schedule(schedule, num_stages, num_microbatches or 4 * num_stages)
    plan = plan_from_graph(problem.graph, problem.topology, partition, cells)
    programs = lower(cells, plan.links)
    verify_programs(programs, plan.placement, plan.links, plan.num_microbatches)
    return _Planned(partition, seconds, plan, programs)


def _schedule(name: str, num_ranks: int, num_microbatches: int) -> "Schedule":
    from pipec.schedules import custom_schedule, make_schedule

    if name.endswith(".txt"):
        return custom_schedule(Path(name), num_ranks, num_microbatches)
    return make_schedule(name, num_ranks, num_microbatches)


def _step(planned: _Planned) -> "Step":
    from pipec.plan.predictions import simulate_plan
    from pipec.viz import Step

    return Step.of_plan(planned.plan, planned.programs, simulate_plan(planned.plan, planned.programs))


def _facts(problem: _Problem, planned: _Planned) -> dict[str, object]:
    stages = [
        {
            "replicas": stage.replicas,
            "operators": [name for operator in stage.operators for name in problem.nodes[operator]],
            "seconds": stage.seconds,
            "communication_seconds": stage.communication_seconds,
            "devices": stage.devices,
        }
        for stage in planned.partition.stages
    ]
    return {
        "seconds": planned.partition.seconds,
        "stages": stages,
        "planning_seconds": planned.planning_seconds,
        "least_seconds": planned.partition.least_seconds,
        "cost_model": problem.cost_model,
    }


def _lines(problem: _Problem, planned: _Planned, step: "Step") -> Iterator[str]:
    """The plan's table, and the planner's own figure beside the simulator's."""
    from pipec.plan.tables import plan_table

    partition, plan = planned.partition, planned.plan
    num_devices = [stage.replicas for stage in partition.stages]
    yield plan_table(plan, planned.programs, num_devices)
    yield ""
    yield (
        f"planner, cost model {problem.cost_model}: {format_seconds(partition.seconds)} a microbatch in the "
        f"slowest stage, planned in {format_seconds(planned.planning_seconds)}"
    )
    yield _bottleneck(partition.stages[partition.slowest], partition.slowest)
    if not partition.is_optimal:
        yield f"not proved optimal: no plan takes less than {format_seconds(partition.least_seconds)}"
    yield (
        f"simulator: {format_seconds(step.timeline.makespan / plan.num_microbatches)} a microbatch, the step "
        f"divided by {plan.num_microbatches}; messages travel beside operators"
    )
    if problem.unknown:
        yield problem.unknown
    if max(num_devices) > 1:
        yield (
            "a stage on r devices is simulated as one rank, r times as fast and without its all-reduce; "
            "bubble and memory count it once"
        )


def _bottleneck(stage: "PlacedStage", index: int) -> str:
    """Why the step is not faster: links and all-reduce, an operator that cannot be divided, or the work."""
    spent = format_seconds(stage.communication_seconds)
    if 2 * stage.communication_seconds > stage.seconds:
        return f"stage {index} bounds the step, most of all by {spent} of links and all-reduce"
    alone = ", all in one operator" if len(stage.operators) == 1 else ""
    return f"stage {index} bounds the step by its operators{alone}; links and all-reduce take {spent}"
