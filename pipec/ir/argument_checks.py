"""Rules for the arguments of a call: one row for each, and an error of one line for a wrong value.

A caller passes a table such as ``{"timeout": SECONDS}`` and the values to ``check_arguments``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipec.errors import InputError


@dataclass(frozen=True)
class ArgumentRule:
    """A check of values, and a description of the valid ones; ``choices`` are the valid texts, if listed."""

    expected: str
    is_valid: Callable[[object], bool]
    choices: tuple[str, ...] = ()

    def __or__(self, other: "ArgumentRule") -> "ArgumentRule":
        return ArgumentRule(
            f"{self.expected} or {other.expected}",
            lambda x: self.is_valid(x) or other.is_valid(x),
            self.choices + other.choices,
        )


def check_arguments(kinds: Mapping[str, ArgumentRule], arguments: Mapping[str, object]) -> None:
    """Raise InputError for the first argument that breaks its rule. Arguments without a row pass."""
    for name, kind in kinds.items():
        if name in arguments and not kind.is_valid(arguments[name]):
            raise InputError(f"{name} is {short_repr(arguments[name])}; expected {kind.expected}")


def short_repr(value: object) -> str:
    """The repr of a value, in one short line."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:
        text = f"a {type(value).__name__} that does not print ({type(error).__name__})"
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


_MAX_CHARACTERS = 80


def instance(expected: str, *types: type) -> ArgumentRule:
    """An object of one of these types. Booleans do not count as numbers."""
    return ArgumentRule(
        expected, lambda x: isinstance(x, types) and (bool in types or not isinstance(x, bool))
    )


def integer_between(least: int, most: int) -> ArgumentRule:
    """A whole number, from ``least`` to ``most``."""
    return ArgumentRule(
        f"a whole number from {least} to {most}",
        lambda x: isinstance(x, int) and not isinstance(x, bool) and least <= x <= most,
    )


def number(above: float, most: float) -> ArgumentRule:
    """A number that is greater than ``above``, and at most ``most``."""
    return ArgumentRule(
        f"a number above {above:g} and up to {most:g}",
        lambda x: isinstance(x, int | float) and not isinstance(x, bool) and above < x <= most,
    )


def one_of(*values: str) -> ArgumentRule:
    return ArgumentRule(
        f"one of {', '.join(map(repr, values))}", lambda x: isinstance(x, str) and x in values, values
    )


def _is_number(value: object) -> bool:
    try:
        return not isinstance(value, bool | str | bytes) and float(value) == float(value)  # type: ignore
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def _is_device(value: object) -> bool:
    import torch  # whoever has devices has loaded it; the command line, which imports this file, has not

    if not isinstance(value, str | torch.device):
        return False
    try:
        return bool(torch.device(value).type)
    except RuntimeError:
        return False


def _are_devices(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return 1 <= len(value) <= MOST_RANKS and all(_is_device(each) for each in value)


MOST_RANKS, MOST_MICROBATCHES = 2**14, 2**20
"""Planning for more takes minutes."""

NUMBER = ArgumentRule("a number", _is_number)
NONE = ArgumentRule("None", lambda x: x is None)
FUNCTION = ArgumentRule("a function", callable)
FLAG = instance("True or False", bool)
PATH = instance("a path", str, Path)
SECONDS = number(0, 1e8)

DEVICE = ArgumentRule("a torch device such as 'cpu' or 'cuda:1'", _is_device)
DEVICES = integer_between(1, MOST_RANKS) | ArgumentRule(
    "a list of torch devices, such as ['cpu', 'cpu']", _are_devices
)
OPTIMIZER = ArgumentRule("a function such as functools.partial(torch.optim.AdamW, lr=1e-3)", callable)
KERNELS = one_of("source", "inductor")
MICROBATCH_WEIGHT = one_of("rows", "sum") | FUNCTION
"""What ``compile`` and ``load`` take as ``devices``, ``optimizer``, ``kernels`` and ``microbatch_weight``."""
