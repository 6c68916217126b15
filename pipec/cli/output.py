"""Output of the command line: results to stdout, errors to stderr, drawings to files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import typer

from pipec.console import rank_zero_only
from pipec.ir import Plan, Program


def show_error(error: Exception) -> None:
    typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)


@rank_zero_only
def write_stdout(text: str) -> None:
    """Write ``text`` to stdout as it is, on rank 0."""
    typer.echo(text, nl=False)


@rank_zero_only
def show_json(summary: Mapping[str, object]) -> None:
    typer.echo(json.dumps(summary, indent=1))


def plan_summary(plan: Plan, programs: Sequence[Program]) -> dict[str, object]:
    """A plan as in plan.json, and the predictions of its programs."""
    from pipec.plan.predictions import prediction_summary

    summary = {each.name: getattr(plan, each.name) for each in fields(Plan)}
    return {"plan": asdict(Plan(**summary)), **prediction_summary(plan, programs)}


def is_drawing(path: Path) -> bool:
    """Whether the name of a file is that of a drawing of a step."""
    from pipec.viz.write_files import SUFFIXES

    return path.suffix in SUFFIXES


def check_drawing(path: Path | None) -> None:
    """Raise InputError if no drawing can be written to ``path``.

    Commands call it before they compute anything.
    """
    from pipec.viz.write_files import check_drawing

    if path is not None:
        check_drawing(path)
