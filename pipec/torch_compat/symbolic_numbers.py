"""The formulas of symbolic numbers."""

from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.printers import PythonPrinter


def formula(number: Any) -> Any:
    """The sympy expression of a symbolic number; any other value as it is."""
    return number.node.expr if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) else number


def forget_tensors(shapes: ShapeEnv | None) -> None:
    """Let symbols forget the tensors whose sizes they are, which nothing would free otherwise.

    Such tensors refer to their symbols in C++, where Python's garbage collector finds no cycle; and caches of
    torch keep the symbols of some hundred captures.
    """
    if shapes is not None:
        shapes.tracked_fakes = None
        shapes.fake_tensor_cache.clear()
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


class _Printer(PythonPrinter):
    """Prints sympy as Python over plain ints; torch's printer also supports symbolic ints."""

    def _print_ToFloat(self, expression: sympy.Expr) -> str:
        return f"float({self._print(expression.args[0])})"

    def _print_OpaqueUnaryFn_sqrt(self, expression: sympy.Expr) -> str:
        return f"math.sqrt({self._print(expression.args[0])})"


def python_expression(expression: sympy.Expr) -> str:
    """Python source of a formula over sizes. It may call builtins and ``math``."""
    return str(_Printer().doprint(expression))
