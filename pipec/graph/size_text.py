"""Sizes of a graph as text: integer expressions in the microbatch size ``b`` and the names of variables."""

from collections.abc import Mapping
from typing import Any

import sympy

from pipec import torch_compat

SymbolNames = Mapping[sympy.Symbol, str]
"""The names of the symbols of a captured graph in shapes and in code."""


def format_size(size: Any, symbols: SymbolNames) -> str:
    """Python source of a size: ``8``, ``b`` or ``4*b``. ``size`` is a number, a SymInt or an expression."""
    expr = torch_compat.formula(size)
    if not isinstance(expr, sympy.Basic):
        return str(expr)
    return torch_compat.python_expression(_named(expr, symbols))


def format_guard(guard: sympy.Basic, symbols: SymbolNames) -> str:
    """Python source of a condition on sizes, such as ``t <= 512``."""
    return torch_compat.python_expression(_named(guard, symbols))


def _named(expr: sympy.Basic, symbols: SymbolNames) -> Any:
    names = {symbol: sympy.Symbol(name, **symbol.assumptions0) for symbol, name in symbols.items()}
    return expr.xreplace(names)
