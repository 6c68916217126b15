"""``pipec plan`` and ``pipec dump``: compile a model and print what came of it."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipec.cli.options import (
    Devices,
    Json,
    MemoryLimit,
    Microbatches,
    ProfilePath,
    Recompute,
    RecomputeChoice,
    ScheduleName,
    Target,
)
from pipec.cli.output import show_json, show_python
from pipec.cli.target import prepare


def plan(
    target: Target,
    devices: Devices,
    schedule: ScheduleName = "1f1b",
    microbatches: Microbatches = None,
    recompute: RecomputeChoice = Recompute.AUTO,
    memory_limit: MemoryLimit = None,
    profile: ProfilePath = None,
    as_json: Json = False,
) -> None:
    """Print the plan of a model: stages, seconds, bytes sent, peak memory, bubble.

    JSON keys: plan, as in plan.json; makespan in seconds; bubble_rate; peak_bytes of each rank.
    """
    from pipec.report import predicted

    pipe = prepare(target, devices, schedule, microbatches, recompute, memory_limit, profile)
    if as_json:
        show_json({"plan": asdict(pipe.plan), **predicted(pipe.plan)})
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
    as_json: Json = False,
) -> None:
    """Print the generated code of a model's stages, or write the whole artifact.

    The artifact holds no parameters: save those with Pipeline.save(dir, tensors=True).

    JSON keys: sources, by stage; programs, by rank; directory, or null.
    """
    from pipec.text import format_program

    pipe = prepare(target, devices, schedule, microbatches, recompute, memory_limit, profile)
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
