"""Fake tensors with given shapes, in symbols that have given names."""

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions


def formula_class(name: str) -> type[sympy.Basic] | None:
    """The class of formulas that has this name, torch's or sympy's; None if there is none."""
    found = getattr(functions, name, None) or getattr(sympy, name, None)
    return found if isinstance(found, type) and issubclass(found, sympy.Basic) else None


def hint_of(size: torch.SymInt) -> int:
    """The number that stood for a symbolic size while it was traced."""
    return int(size.node.hint)


def is_plain_fake(value: torch.Tensor) -> bool:
    """Whether type, shape and strides say all about a tensor that has no memory."""
    return (
        type(value) in (FakeTensor, torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_conj() or value.is_neg())
    )


class Fakes:
    """Makes fake tensors. ``sizes`` has for each symbol the number that stands for it."""

    def __init__(self, sizes: Mapping[sympy.Symbol, int]) -> None:
        self._sizes = sizes
        self._symbols = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._symbols, allow_non_fake_inputs=True)
        for symbol, size in sizes.items():
            self._symbols.var_to_range[symbol] = self._symbols._default_value_range()
            add = getattr(self._symbols, "add_backed_var_to_val", self._symbols.add_var_to_val)
            add(symbol, size)

    def tensor(
        self, shape: Sequence[Any], strides: Sequence[Any], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        with self._mode:
            sizes = [self.size(size) for size in shape]
            return torch.empty_strided(
                sizes, [self.size(stride) for stride in strides], dtype=dtype, device=device
            )

    def size(self, formula: Any) -> Any:
        """A number, or the symbolic number of a formula."""
        if not isinstance(formula, sympy.Basic):
            return formula
        return self._symbols.create_symintnode(formula, hint=int(formula.subs(self._sizes)))
