"""``pipec plan`` and ``pipec dump``: compile a model and print what came of it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipec.cli.graphs import GraphOptions, plan_graph
from pipec.cli.options import (
    Bandwidth,
    Calibrate,
    CostModelName,
    Devices,
    DnnPartitioning,
    Json,
    Levels,
    MemoryLimit,
    Microbatches,
    OptionalTarget,
    PipeDreamGraph,
    ProfilePath,
    Recompute,
    RecomputeChoice,
    ScheduleName,
    Target,
    TopologyFile,
)
from pipec.cli.output import show_json, show_python
from pipec.cli.target import prepare
from pipec.errors import InputError

if TYPE_CHECKING:
    from pipec.pipeline import Pipeline


def plan(
    target: OptionalTarget = None,
    devices: Levels = None,
    schedule: ScheduleName = "1f1b",
    microbatches: Microbatches = None,
    recompute: RecomputeChoice = Recompute.AUTO,
    memory_limit: MemoryLimit = None,
    profile: ProfilePath = None,
    calibrate: Calibrate = False,
    pipedream_graph: PipeDreamGraph = None,
    dnn_partitioning: DnnPartitioning = None,
    bandwidth: Bandwidth = None,
    topology: TopologyFile = None,
    cost_model: CostModelName = None,
    as_json: Json = False,
) -> None:
    """Print the plan of a model: stages, seconds, bytes sent, peak memory, bubble, and what else was tried.

    Without --microbatches their number is searched, which takes twice as long to capture.

    JSON keys: plan, as in plan.json; makespan in seconds; bubble_rate; peak_bytes of each rank.

    Or the plan of a published graph, with replicas. JSON keys: seconds of the slowest stage; stages, each
    with replicas, operators, seconds, communication_seconds, devices; planning_seconds; least_seconds, which
    no plan is below.
    """
    if pipedream_graph is None and dnn_partitioning is None:
        if devices is None and topology is not None:
            devices = _number_of_devices(topology)
        if target is None or devices is None or not devices.isdecimal() or int(devices) < 1:
            raise InputError(
                "to plan a model, give a TARGET and its number of --devices, 1 or more, or a --topology"
            )
        if (bandwidth, cost_model) != (None, None):
            raise InputError("--bandwidth and --cost-model are for graphs, not for a model")
        one_size = not as_json and profile is None and microbatches is not None
        pipe = prepare(
            target,
            int(devices),
            schedule,
            microbatches,
            recompute,
            memory_limit,
            profile,
            topology,
            calibrated=calibrate,
            dynamic=not one_size,
        )
        return _show_plan(pipe, as_json)
    if target is not None:
        raise InputError(f"give either the target {target} or a graph, not both")
    options = GraphOptions(pipedream_graph, dnn_partitioning, devices, bandwidth, topology, cost_model)
    return plan_graph(options, as_json)


def _number_of_devices(topology: Path) -> str:
    from pipec.hardware.topology import read_topology

    return str(len(read_topology(topology).devices))


def _show_plan(pipe: "Pipeline", as_json: bool) -> None:
    from pipec.plan.predictions import predicted

    if as_json:
        facts = asdict(pipe.plan)
        del facts["programs"]
        show_json({"plan": facts, **predicted(pipe.plan, pipe.programs)})
    else:
        typer.echo(pipe.plan)


def dump(
    target: Target,
    devices: Devices,
    stage: Annotated[int | None, typer.Option(help="Only the code of this stage.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the artifact to this folder.")
    ] = None,
    schedule: ScheduleName = "1f1b",
    microbatches: Microbatches = None,
    recompute: RecomputeChoice = Recompute.AUTO,
    memory_limit: MemoryLimit = None,
    profile: ProfilePath = None,
    topology: TopologyFile = None,
    as_json: Json = False,
) -> None:
    """Print the generated code of a model's stages, or write the whole artifact.

    The artifact holds no parameters: save those with Pipeline.save(dir, tensors=True).

    JSON keys: sources, by stage; programs, by rank; directory, or null.
    """
    from pipec.ir.text import format_program

    pipe = prepare(target, devices, schedule, microbatches, recompute, memory_limit, profile, topology)
    stages = range(len(pipe.plan.stages)) if stage is None else [stage]
    sources = {str(k): pipe.source(k) for k in stages}
    if output is not None:
        pipe.save(output)
    if as_json:
        programs = {str(program.rank): format_program(program) for program in pipe.programs}
        show_json({"sources": sources, "programs": programs, "directory": str(output) if output else None})
    elif output is None or stage is not None:
        show_python("\n\n".join(sources.values()))
    else:
        typer.echo(f"wrote plan.json, the code of {len(sources)} stages and their programs to {output}")
