"""The command line, ``pipec COMMAND``.

Each command imports other modules only when it runs: ``--help`` and ``schedule`` load no torch, ``check`` and
``run`` no compiler.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import pipec
from pipec.cli.checkpoints import commands as checkpoint
from pipec.cli.folders import check, run
from pipec.cli.output import show_error
from pipec.cli.plan_command import plan
from pipec.cli.profiling import profile
from pipec.cli.schedule_command import schedule
from pipec.errors import InputError, PipecError

RENAMED = {
    "dump": "pipec plan TARGET --code prints the code, and pipec plan TARGET -o FOLDER writes the artifact",
    "trace": "pipec run FOLDER --trace -o page.html records the steps of an artifact",
}
"""What took the place of former commands."""


class _Commands(TyperGroup):
    """Prints pipec's own errors without a traceback. Any other error is a bug and keeps its traceback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args[0] in RENAMED:
            raise InputError(f"there is no command {args[0]} any more; {RENAMED[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PipecError as error:
            show_error(error)
            raise typer.Exit(2 if isinstance(error, InputError) else 1) from error


app = typer.Typer(
    cls=_Commands,
    epilog="Exit status: 0 success, 1 the plan, the check or the run failed, 2 invalid arguments.",
    rich_markup_mode="markdown",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _show_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"pipec {pipec.__version__}")
        raise typer.Exit()


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Cut a PyTorch model into pipeline stages, inspect every part of the result, and run it."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(profile)
app.command()(plan)
app.command()(schedule)
app.command()(check)
app.command()(run)
app.add_typer(checkpoint, name="checkpoint")


def main() -> None:
    app(prog_name="pipec")
