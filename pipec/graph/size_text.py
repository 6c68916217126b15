"""Sizes of a graph as text: integer expressions in the microbatch size ``b`` and the names of variables."""

import functools
from collections.abc import Mapping
from typing import Any

import sympy

from pipec.torch_compat.symbolic_numbers import formula, python_expression

SymbolNames = Mapping[sympy.Symbol, str]
"""The names of the symbols of a captured graph in shapes and in code."""


def format_size(size: Any, symbols: SymbolNames) -> str:
    """Python source of a size: ``8``, ``b`` or ``4*b``. ``size`` is a number, a SymInt or an expression."""
    found = formula(size)
    return _text(found, tuple(symbols.items())) if isinstance(found, sympy.Basic) else str(found)


def format_guard(guard: sympy.Basic, symbols: SymbolNames) -> str:
    """Python source of a condition on sizes, such as ``t <= 512``."""
    return _text(guard, tuple(symbols.items()))


@functools.lru_cache(maxsize=10_000)
def _text(formula: sympy.Basic, symbols: tuple[tuple[sympy.Symbol, str], ...]) -> str:
    names = {symbol: sympy.Symbol(name, **symbol.assumptions0) for symbol, name in symbols}
    return python_expression(formula.xreplace(names))
