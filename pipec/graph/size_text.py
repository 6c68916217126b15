"""Sizes of a graph as text: integer expressions in the microbatch size ``b`` and the names of variables."""

import functools
from collections.abc import Mapping
from typing import Any

import sympy

from pipec import torch_compat

SymbolNames = Mapping[sympy.Symbol, str]
"""The names of the symbols of a captured graph in shapes and in code."""


def format_size(size: Any, symbols: SymbolNames) -> str:
    """Python source of a size: ``8``, ``b`` or ``4*b``. ``size`` is a number, a SymInt or an expression."""
    formula = torch_compat.formula(size)
    return _text(formula, tuple(symbols.items())) if isinstance(formula, sympy.Basic) else str(formula)


def format_guard(guard: sympy.Basic, symbols: SymbolNames) -> str:
    """Python source of a condition on sizes, such as ``t <= 512``."""
    return _text(guard, tuple(symbols.items()))


@functools.lru_cache(maxsize=10_000)
def _text(formula: sympy.Basic, symbols: tuple[tuple[sympy.Symbol, str], ...]) -> str:
    names = {symbol: sympy.Symbol(name, **symbol.assumptions0) for symbol, name in symbols}
    return torch_compat.python_expression(formula.xreplace(names))
