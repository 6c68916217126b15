"""The command line: ``pipec profile | plan | dump | schedule | check | run | trace``.

Each command imports what it needs when it runs: ``--help`` and ``schedule NAME`` load no torch, ``check`` and
``run`` no compiler.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from pipec.cli.artifacts import check, run
from pipec.cli.models import dump, plan
from pipec.cli.output import show_error
from pipec.cli.profiling import profile
from pipec.cli.timelines import schedule
from pipec.cli.tracing import trace
from pipec.errors import InputError, PipecError


class _Commands(TyperGroup):
    """Prints an error of pipec's own without a traceback; any other is a fault and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PipecError as error:
            show_error(error)
            raise typer.Exit(2 if isinstance(error, InputError) else 1) from error


app = typer.Typer(
    cls=_Commands,
    help="Cut a PyTorch model into pipeline stages, look at every part of the result, and run it.",
    epilog="Exit status: 0 fine, 1 the plan, the check or the run failed, 2 arguments that do not fit.",
    rich_markup_mode="markdown",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (profile, plan, dump, schedule, check, run, trace):
    app.command()(command)


def main() -> None:
    app(prog_name="pipec")
