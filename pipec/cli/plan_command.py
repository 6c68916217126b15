"""``pipec plan``: compile a model, and print, write or draw its plan."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipec.cli.flags import Json, Target, compile_flags
from pipec.cli.output import show_json, write_stdout
from pipec.cli.target import compile_target, refuse_folder
from pipec.errors import InputError
from pipec.ir.argument_checks import MOST_RANKS

if TYPE_CHECKING:
    from pipec.pipeline import Pipeline


@compile_flags()
def plan(
    target: Target,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices", min=1, max=MOST_RANKS, help="Number of ranks; default: those of --topology."
        ),
    ] = None,
    code: Annotated[bool, typer.Option("--code", help="Print the code of the stages.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A folder for plan, code and programs; a file for a drawing of the step: .html, .svg, .txt, "
            "or .json for Perfetto and Chrome; or a .csv for the orders that torch's pipelining loads.",
        ),
    ] = None,
    *,
    options: Mapping[str, Any],
    as_json: Json = False,
) -> None:
    """Print the plan of a model: stages, seconds, bytes sent, peak memory, bubble, and other candidates.

    A folder that -o writes is an artifact without parameters; Pipeline.save(folder, tensors=True) saves those
    too. With -o order.csv stages are cut between modules, as torch's pipelining needs, and their names are
    written to order.modules.json.

    JSON keys: plan, as in plan.json; makespan in seconds; bubble_rate; peak_bytes of each rank; with --code
    also sources, by stage.
    """
    refuse_folder(target)
    if devices is None:
        if options["topology"] is None:
            raise InputError(
                "the number of ranks is missing; give it with --devices, or a file with --topology"
            )
        from pipec.hardware.topology import read_topology

        devices = len(read_topology(options["topology"]).devices)
    for_torch = output is not None and output.suffix == ".csv"
    pipe = compile_target(target, devices, options, between_modules=for_torch)
    wrote = "" if output is None else f"wrote plan, code and programs to {output}"
    sources = {str(stage): pipe.source(stage) for stage in range(len(pipe.plan.stages))}
    if output is not None and _is_drawing(output):
        pipe.visualize(output)
        wrote = f"wrote {output}"
    elif output is not None and for_torch:
        wrote = (
            f"wrote the orders to {output}, and the modules of each stage to {_write_orders(pipe, output)}"
        )
    elif output is not None:
        pipe.save(output)
    if as_json:
        summary = _summary(pipe)
        show_json({**summary, "sources": sources} if code else summary)
    elif code:
        write_stdout("\n\n".join(sources.values()))
    else:
        typer.echo(wrote or pipe.plan)


def _summary(pipe: "Pipeline") -> dict[str, object]:
    """The plan as in plan.json, and the predicted step: seconds, bubble rate, peak bytes of each rank."""
    from pipec.timeline.steady_state import steady_state

    artifact, timeline = pipe._executions.trained, pipe.simulate()
    assert artifact is not None
    steady = steady_state(timeline)
    own = {"time": steady.batch_interval, "bubble_rate": steady.bubble_rate} if steady else None
    return {
        "plan": asdict(artifact.plan),
        "makespan": timeline.makespan,
        "bubble_rate": timeline.bubble_rate,
        **({"steady": own} if own else {}),
        "peak_bytes": [need.peak_bytes for need in pipe.memory()],
    }


def _write_orders(pipe: "Pipeline", path: Path) -> Path:
    """Write the compute orders, and the names of the modules of each stage to a file beside them."""
    orders, modules, beside = pipe.plan.to_csv(), pipe.plan.module_fqns(), path.with_suffix(".modules.json")
    for file, text in ((path, orders), (beside, json.dumps(modules, indent=2) + "\n")):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{file} cannot be written: {error}") from error
    return beside


def _is_drawing(path: Path) -> bool:
    """Whether the name of a file is that of a drawing of a step."""
    from pipec.viz.write_files import SUFFIXES

    return path.suffix in SUFFIXES
