"""Output of the command line: results to stdout, errors to stderr, drawings to files."""

import json
from collections.abc import Mapping
from pathlib import Path

import typer

from pipec.console import rank_zero_only


def show_error(error: Exception) -> None:
    typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)


@rank_zero_only
def write_stdout(text: str) -> None:
    """Write ``text`` to stdout as it is, on rank 0."""
    typer.echo(text, nl=False)


@rank_zero_only
def show_json(summary: Mapping[str, object]) -> None:
    typer.echo(json.dumps(summary, indent=1))


def check_drawing(path: Path | None) -> None:
    """Raise InputError if no drawing can be written to ``path``.

    Commands call it before they compute anything.
    """
    from pipec.viz.write_files import check_drawing

    if path is not None:
        check_drawing(path)
