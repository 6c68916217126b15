"""Sizes of a graph as text: integer expressions in the microbatch size ``b``."""

from typing import Any

import sympy
import torch

from pipec import torch_compat


def dimension(size: Any, batch: sympy.Symbol | None) -> str:
    """Python source of a size: ``8``, ``b`` or ``4*b``. A symbolic size is given as itself or its formula."""
    expr = size.node.expr if isinstance(size, torch.SymInt) else size
    if not isinstance(expr, sympy.Basic):
        return str(expr)
    if batch is not None:
        expr = expr.xreplace({batch: sympy.Symbol("b", integer=True, positive=True)})
    return torch_compat.python_expression(expr)
