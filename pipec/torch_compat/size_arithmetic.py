"""A cache for arithmetic on symbolic sizes.

For every tensor of a trace, torch computes whether it is contiguous and how many elements it has: some eighty
operations for each operator of a graph, each through sympy. A training graph repeats a few hundred of them.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

CACHED_METHODS = (
    *("add", "sub", "mul", "int_floordiv", "eq", "ne", "lt", "le", "gt", "ge"),
    *("and_", "or_", "sym_min", "sym_max"),
)
"""Methods of symbolic numbers whose result depends on the operands alone. ``mod`` is not one of them: its
result depends on the range that torch has derived for the symbols so far."""

Method = Callable[[SymNode, SymNode], SymNode]

T = TypeVar("T")


@contextlib.contextmanager
def cached_size_arithmetic() -> Iterator[None]:
    """Cache the results of operations on equal symbolic numbers within one trace.

    Data-dependent numbers are not cached, because the graph must compute them.
    """
    methods: dict[str, Any] = {
        name: getattr(SymNode, name) for name in (*CACHED_METHODS, "maybe_as_int", "wrap_int")
    }
    operand = _remembered("operand", _Operands())
    replaced = {name: _cached(methods[name], operand) for name in CACHED_METHODS} | {
        "maybe_as_int": _remembered("int", methods["maybe_as_int"]),
        "wrap_int": _wrapped_once(methods["wrap_int"]),
    }
    for name, method in replaced.items():
        setattr(SymNode, name, method)
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(SymNode, name, method)


def _cached(method: Method, operand: Callable[[SymNode], int | None]) -> Method:
    cache: dict[tuple[Any, ...], SymNode] = {}

    def cached(self: SymNode, other: SymNode) -> SymNode:
        one, another = operand(self), operand(other)
        if one is None or another is None:
            return method(self, other)
        key = get_proxy_mode(), one, another
        result = cache.get(key)
        if result is None:
            result = cache[key] = method(self, other)
        return result

    return cached


def _remembered(name: str, function: Callable[[SymNode], T]) -> Callable[[SymNode], T]:
    """The same function, called again for a number only if torch has replaced a symbol since.

    A torch that does not count replacements has it called each time.
    """
    attribute = f"_pipec_{name}"

    def remembered(number: SymNode) -> T:
        version = getattr(number.shape_env, "_replacements_version_counter", None)
        known: tuple[int | None, T] = number.__dict__.get(attribute, (None, None))
        if known[0] is None or known[0] != version:
            known = number.__dict__[attribute] = version, function(number)
        return known[1]

    return remembered


_operand_numbers = itertools.count()


class _Operands:
    """Gives equal operands of one trace the same integer, and those of two traces different ones."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Any, ...], int] = {}

    def __call__(self, number: SymNode) -> int | None:
        """The integer of everything that an operation reads of a number, with known symbols replaced.

        None for one that torch does not know in the call that is traced, as a data-dependent one.
        """
        if type(number) is not SymNode or type(number.hint) not in (int, float, bool):
            return None
        key = number.shape_env, number.expr, number.pytype, number.hint, number.constant
        if key not in self._numbers:
            self._numbers[key] = next(_operand_numbers)
        return self._numbers[key]


def _wrapped_once(wrap: Callable[[SymNode, int], SymNode]) -> Callable[[SymNode, int], SymNode]:
    wrapped: dict[tuple[ShapeEnv | None, int], SymNode] = {}

    def wrapped_once(self: SymNode, value: int) -> SymNode:
        key = self.shape_env, value
        if type(value) is not int:
            return wrap(self, value)
        if key not in wrapped:
            wrapped[key] = wrap(self, value)
        return wrapped[key]

    return wrapped_once
