"""A command with two variants, ``pipec schedule NAME`` and ``pipec schedule TARGET``, with own options.

For typer they are two commands, named ``schedule NAME`` and ``schedule TARGET``.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from typer.core import TyperCommand


def command_variant(words: Sequence[str]) -> str:
    """The variant that a command line selects. Its first word is ``schedule``; a target contains a colon.

    So may the path of a schedule in a text file.
    """
    targets = (
        word
        for before, word in pairwise(words)
        if ":" in word and not word.startswith("-") and not word.endswith(".txt")
        if before not in _PATH_OPTIONS
    )
    return f"{words[0]} TARGET" if any(targets) else f"{words[0]} NAME"


_PATH_OPTIONS = ("-o", "--output")
"""Options whose values may contain a colon too."""


class CommandVariant(TyperCommand):
    """One variant of a command. ``--help`` shows all; for a misplaced option, the error names its variant."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for variant in _variants(ctx):
            TyperCommand.format_help(variant, ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {word.partition("=")[0] for word in args if word.startswith("--")} - _options(self)
        for variant in _variants(ctx):
            if misplaced := sorted(options & _options(variant)):
                ctx.fail(
                    f"No such option: {misplaced[0]}. It belongs to the other variant, pipec {variant.name}."
                )
        if not args:
            ctx.fail(
                "Which schedule? Give its NAME, such as 1f1b, zb-h1 or auto, or a .txt file of compute "
                "orders; or the TARGET of a model, such as model.py:factory, with --devices."
            )
        return super().parse_args(ctx, args)


def _variants(ctx: Any) -> Iterator["CommandVariant"]:
    return (
        command for command in ctx.parent.command.commands.values() if isinstance(command, CommandVariant)
    )


def _options(variant: "CommandVariant") -> set[str]:
    return {option for param in variant.params for option in param.opts}
