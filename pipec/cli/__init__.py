"""The command line, ``pipec COMMAND``: from ``profile`` and ``plan`` to ``run`` and ``checkpoint``.

Each command imports what it needs when it runs: ``--help`` and ``schedule NAME`` load no torch, ``check`` and
``run`` no compiler. ``drawing``, ``output``, ``options`` and ``command_variants`` are what commands share.
"""

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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
    """Prints an error of pipec's own without a traceback; any other is a fault and keeps its traceback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        """``schedule`` stands for one of two commands, which its arguments tell."""
        named = command_variant(args) if args[0] == "schedule" else args[0]
        _, command, rest = super().resolve_command(ctx, [named, *args[1:]])
        return args[0], command, rest

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """The two forms of ``schedule`` are one word."""
        found = super().shell_complete(ctx, incomplete)
        for item in found:
            item.value = item.value.partition(" ")[0]
        return list({item.value: item for item in found}.values())

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PipecError as error:
            show_error(error)
            raise typer.Exit(2 if isinstance(error, InputError) else 1) from error


app = typer.Typer(
    cls=_Commands,
    epilog="Exit status: 0 fine, 1 the plan, the check or the run failed, 2 arguments that do not fit.",
    rich_markup_mode="markdown",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pipec {version('pipec')}")
        raise typer.Exit()


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Cut a PyTorch model into pipeline stages, look at every part of the result, and run it."""
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
