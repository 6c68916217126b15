"""The formulas of symbolic numbers."""

from typing import Any

import torch


def formula(number: Any) -> Any:
    """The sympy expression of a symbolic number; any other value as it is."""
    return number.node.expr if isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) else number
