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
    "_add",
    "_sub",
    "_mul",
    "_int_floordiv",
    "_eq",
    "_ne",
    "_lt",
    "_le",
    "_gt",
    "_ge",
    "_and_",
    "_or_",
    "_sym_min",
    "_sym_max",
)
"""Methods of symbolic numbers whose result depends on the operands alone. ``_mod`` is not one of them: its
result depends on the range that torch has derived for the symbols so far."""

Method = Callable[[SymNode, SymNode], SymNode]


@contextlib.contextmanager
def cached_size_arithmetic() -> Iterator[None]:
    """Cache the results of operations on equal symbolic numbers within one trace.

    Data-dependent numbers are not cached, because the graph must compute them.
    """
    methods: dict[str, Method] = {name: getattr(SymNode, name) for name in CACHED_METHODS}
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
        if not (_has_hint(self) and _has_hint(other)):
            return method(self, other)
        key = (get_proxy_mode(), self.shape_env, *_operand(self), *_operand(other))
        result = cache.get(key)
        if result is None:
            result = cache[key] = method(self, other)
        return result

    return cached


def _has_hint(number: SymNode) -> bool:
    """Whether torch knows the number in the call that is traced, which a data-dependent one is not."""
    return type(number) is SymNode and type(number.hint) in (int, float, bool)


def _operand(number: SymNode) -> tuple[Any, ...]:
    """Everything that an operation reads of a number, with known symbols replaced."""
    return number.expr, number.pytype, number.hint, number.constant
