"""``pipec plan`` and ``pipec dump``: compile a model, and print its plan or its code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from pipec.cli.flags import Devices, Json, Target, compile_flags
from pipec.cli.output import plan_summary, show_json, show_python
from pipec.cli.target import compile_target
from pipec.errors import InputError
from pipec.ir.argument_checks import MOST_RANKS


@compile_flags()
def plan(
    target: Target,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices", min=1, max=MOST_RANKS, help="Number of ranks; default: those of --topology."
        ),
    ] = None,
    *,
    options: Mapping[str, Any],
    as_json: Json = False,
) -> None:
    """Print the plan of a model: stages, seconds, bytes sent, peak memory, bubble, and other candidates.

    Without --microbatches, their number is searched.

    JSON keys: plan, as in plan.json; makespan in seconds; bubble_rate; peak_bytes of each rank.
    """
    if devices is None:
        if options["topology"] is None:
            raise InputError(
                "the number of ranks is missing; give it with --devices, or a file with --topology"
            )
        devices = _num_devices(options["topology"])
    pipe = compile_target(target, devices, options)
    if as_json:
        show_json(plan_summary(pipe.plan, pipe.plan.programs))
    else:
        typer.echo(pipe.plan)


def _num_devices(topology: Path) -> int:
    from pipec.hardware.topology import read_topology

    return len(read_topology(topology).devices)


@compile_flags()
def dump(
    target: Target,
    devices: Devices,
    stage: Annotated[int | None, typer.Option(help="Only the code of this stage.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the artifact to this folder.")
    ] = None,
    *,
    options: Mapping[str, Any],
    as_json: Json = False,
) -> None:
    """Print the generated code of a model's stages, or write the whole artifact.

    The artifact holds no parameters: save those with Pipeline.save(dir, tensors=True).

    JSON keys: sources, by stage; programs, by rank; directory, or null.
    """
    from pipec.ir.text_format import format_program

    pipe = compile_target(target, devices, options)
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
