"""A cache for arithmetic on symbolic sizes.

For every tensor of a trace, torch computes whether it is contiguous and how many elements it has: some eighty
operations for each operator of a graph, each through sympy. A training graph repeats a few hundred of them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

CACHED_METHODS = (
    *("add", "sub", "mul", "int_floordiv", "eq", "ne", "lt", "le", "gt", "ge"),
    *("and_", "or_", "sym_min", "sym_max"),
)
"""Methods of symbolic numbers whose result depends on the operands alone. ``mod`` is not one of them: its
result depends on the range that torch has derived for the symbols so far."""

Method = Callable[[SymNode, SymNode], SymNode]


@contextlib.contextmanager
def cached_size_arithmetic() -> Iterator[None]:
    """Cache the results of operations on equal symbolic numbers within one trace.

    Data-dependent numbers are not cached, because the graph must compute them.
    """
    methods: dict[str, Any] = {name: getattr(SymNode, name) for name in CACHED_METHODS}
    for name, method in methods.items():
        setattr(SymNode, name, _cached(method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(SymNode, name, method)


def _cached(method: Method) -> Method:
    cache: dict[tuple[Any, ...], SymNode] = {}

    def cached(self: SymNode, other: SymNode) -> SymNode:
        one, another = _operand(self), _operand(other)
        if one is None or another is None:
            return method(self, other)
        key = get_proxy_mode(), one, another
        result = cache.get(key)
        if result is None:
            result = cache[key] = method(self, other)
        return result

    return cached


def _operand(number: SymNode) -> tuple[Any, ...] | None:
    """Everything that an operation reads of a number, with known symbols replaced.

    None for one that torch does not know in the call that is traced, as a data-dependent one.
    """
    if type(number) is not SymNode or type(number.hint) not in (int, float, bool):
        return None
    return number.shape_env, number.expr, number.pytype, number.hint, number.constant
