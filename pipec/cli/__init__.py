"""The command line, ``pipec COMMAND``: from ``profile`` and ``plan`` to ``run`` and ``checkpoint``.

Each command imports other modules only when it runs: ``--help`` and ``schedule NAME`` load no torch,
``check`` and ``run`` no compiler. Commands share ``drawing``, ``output``, ``flags`` and ``command_variants``.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import pipec
from pipec.cli.artifacts import check, run
from pipec.cli.checkpoints import commands as checkpoint
from pipec.cli.command_variants import CommandVariant, command_variant
from pipec.cli.output import show_error
from pipec.cli.plan_and_dump import dump, plan
from pipec.cli.profiling import profile
from pipec.cli.schedule_command import schedule_name, schedule_target
from pipec.cli.tracing import trace
from pipec.errors import InputError, PipecError


class _Commands(TyperGroup):
    """Prints pipec's own errors without a traceback. Any other error is a bug and keeps its traceback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """Find a command. ``schedule`` is one of two commands, depending on its arguments."""
        name = command_variant(args) if args[0] == "schedule" else args[0]
        _, command, rest = super().resolve_command(ctx, [name, *args[1:]])
        return args[0], command, rest

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Completions, in which the two variants of ``schedule`` are one word."""
        items = super().shell_complete(ctx, incomplete)
        for item in items:
            item.value = item.value.partition(" ")[0]
        return list({item.value: item for item in items}.values())

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
app.command()(dump)
app.command("schedule NAME", cls=CommandVariant)(schedule_name)
app.command("schedule TARGET", cls=CommandVariant)(schedule_target)
app.command()(check)
app.command()(run)
app.command()(trace)
app.add_typer(checkpoint, name="checkpoint")


def main() -> None:
    app(prog_name="pipec")
