"""Output of the command line: results to stdout, errors to stderr, drawings to files."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from pipec.console import rank_zero_only, terminal
from pipec.ir import Plan, Program

_ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)


def show_error(error: Exception) -> None:
    _ERRORS.print(Text.assemble(("error: ", "bold red"), (str(error), "red")))


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


def show_python(source: str) -> None:
    """Print Python, coloured in a terminal."""
    if terminal().is_terminal:
        terminal().print(Syntax("", "python", theme="ansi_dark").highlight(source), end="")
    else:
        typer.echo(source, nl=False)


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
