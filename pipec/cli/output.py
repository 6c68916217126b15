"""What the command line writes: results to stdout, progress and errors to stderr."""

import json
from collections.abc import Mapping

import typer
from rich.console import Console
from rich.status import Status
from rich.syntax import Syntax
from rich.text import Text

from pipec.console import is_rank_zero, rank_zero_only, terminal

_ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)
_PROGRESS = Console(stderr=True, quiet=not is_rank_zero())


def status(doing: str) -> Status:
    """A spinner beside ``doing`` while the block runs, on rank 0 and in a terminal; elsewhere nothing."""
    return _PROGRESS.status(f"{doing} ...")


def show_error(error: Exception) -> None:
    _ERRORS.print(Text.assemble(("error: ", "bold red"), (str(error), "red")))


@rank_zero_only
def show_json(facts: Mapping[str, object]) -> None:
    typer.echo(json.dumps(facts, indent=1))


def show_python(source: str) -> None:
    """Python in colour in a terminal, elsewhere as it is."""
    if terminal().is_terminal:
        terminal().print(Syntax("", "python", theme="ansi_dark").highlight(source), end="")
    else:
        typer.echo(source, nl=False)
