"""The arguments and options that commands share."""

import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from pipec.errors import InputError
from pipec.ir.argument_checks import check_arguments
from pipec.options import OPTIONS, Flag, Options


def compile_flags(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command flags for these options of ``compile``; without names, for all that change a plan.

    They replace the command's parameter ``options``, which receives their values by name.
    """
    all_flags = {name: each.flag for name, each in OPTIONS.items() if each.flag}
    flags = {name: flag for name, flag in all_flags.items() if (name in names if names else flag.plans)}
    rules = {name: OPTIONS[name].rule for name, flag in flags.items() if flag.reads is not str}

    def with_flags(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            options = {name: _plain(arguments.pop(name)) for name in flags}
            check_arguments(rules, options)
            command(**arguments, options=options)

        signature = inspect.signature(command)
        parameters = list(signature.parameters.values())
        position = list(signature.parameters).index("options")
        parameters[position : position + 1] = [_parameter(name, flag) for name, flag in flags.items()]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return with_flags


def _parameter(name: str, flag: Flag) -> inspect.Parameter:
    """The parameter of a command from which typer derives the flag."""
    default, make_enum = getattr(Options, name), cast(Any, StrEnum)
    value_type: Any = flag.reads or (bool if isinstance(default, bool) else None)
    value_type = value_type or make_enum(name, [(choice, choice) for choice in OPTIONS[name].rule.choices])
    info = typer.Option(f"--{name.replace('_', '-')}", help=flag.help, metavar=flag.metavar)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=str(default) if value_type is str and default is not None else default,
        annotation=Annotated[value_type if default is not None else value_type | None, info],
    )


def _plain(value: object) -> object:
    return value.value if isinstance(value, StrEnum) else value


def parse_replicas(text: str) -> int | tuple[int, ...] | str:
    """Parse ``2``, ``3-2-1`` or ``auto`` for ``pipec.compile``. Raises InputError."""
    if text == "auto":
        return text
    parts = text.split("-")
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise InputError(
            f"--replicas is {text!r}; expected a number such as 2, the numbers of all stages such as 3-2-1, "
            "or auto"
        )
    numbers = tuple(map(int, parts))
    return numbers if len(numbers) > 1 else numbers[0]


Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="path/to/file.py:factory or package.module:factory; factory() returns a pipec.Example.",
    ),
]
Drawing = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File to draw: .html, .svg, .txt, or .json for Perfetto and Chrome."),
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of the random inputs and tensors.")
]
IntHigh = Annotated[
    int, typer.Option("--int-high", min=1, max=2**63 - 1, help="Random integers are below this.")
]
Steps = Annotated[int, typer.Option("--steps", min=1, max=10**9, help="Number of steps to run.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
