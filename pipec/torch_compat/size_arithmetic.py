"""Arithmetic on symbolic sizes, done once for operands that are the same.

Torch computes with the sizes of every tensor that it makes, whether it is contiguous and how many elements it
has: some eighty operations for each operator of a graph, each of them through sympy. A training graph has the
same few hundred over and over.
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
"""Methods of symbolic numbers whose result follows from what the operands are. That of ``_mod`` does not: it
depends on the range that the symbols are known to have by then."""

Method = Callable[[SymNode, SymNode], SymNode]


@contextlib.contextmanager
def cached_size_arithmetic() -> Iterator[None]:
    """Let operations on equal symbolic numbers return what the first of them returned, within one trace.

    Numbers that depend on values of tensors are left out: the graph keeps what computes them.
    """
    methods: dict[str, Method] = {name: getattr(SymNode, name) for name in CACHED_METHODS}
    for name, method in methods.items():
        setattr(SymNode, name, _remembered(method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(SymNode, name, method)


def _remembered(method: Method) -> Method:
    known: dict[tuple[Any, ...], SymNode] = {}

    def computed(self: SymNode, other: SymNode) -> SymNode:
        if not (_has_hint(self) and _has_hint(other)):
            return method(self, other)
        key = (get_proxy_mode(), self.shape_env, *_operand(self), *_operand(other))
        result = known.get(key)
        if result is None:
            result = known[key] = method(self, other)
        return result

    return computed


def _has_hint(number: SymNode) -> bool:
    """Whether torch knows the number in the call that is traced; of what values tell it does not."""
    return type(number) is SymNode and type(number.hint) in (int, float, bool)


def _operand(number: SymNode) -> tuple[Any, ...]:
    """All that an operation reads of a number, with what is known of its symbols put in."""
    return number.expr, number.pytype, number.hint, number.constant
