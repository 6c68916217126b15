"""Sizes of fake tensors as sympy expressions, and their values at a microbatch size ``b``.

Other symbolic sizes have in every cost the number that they were captured with.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import sympy
import torch

from pipec.errors import PlanError
from pipec.graph import TrainingGraph

MICROBATCH = sympy.Symbol("b", integer=True, positive=True)
"""The microbatch size in every cost, whatever symbol the captured graph has for it."""

SymbolSubstitutions = tuple[tuple[sympy.Symbol, sympy.Expr], ...]
"""The expression that replaces each symbol of a captured graph in costs."""

_CACHE = 1 << 14
"""Layers repeat, so a graph has few distinct expressions: each product, sum and value is computed once."""


def symbol_substitutions(graph: TrainingGraph) -> SymbolSubstitutions:
    """The microbatch size as ``MICROBATCH``, each variable as the size that it was captured with, and what is
    predicted for data-dependent sizes.
    """
    variables = tuple(
        (symbol, sympy.sympify(graph.planned_sizes[name])) for symbol, name in graph.variable_symbols.items()
    )
    known = variables if graph.batch is None else ((graph.batch, MICROBATCH), *variables)
    values = (
        (symbol, substitute_symbols(size, known)) for symbol, size in graph.data_dependent_sizes.items()
    )
    return *known, *values


@dataclass(frozen=True, slots=True)
class TensorSize:
    """One tensor. ``stored_shape`` is its shape without broadcast dimensions, those of stride 0."""

    shape: tuple[sympy.Expr, ...]
    stored_shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> sympy.Expr:
        return product(self.shape)

    @property
    def dense_bytes(self) -> sympy.Expr:
        """Bytes that saving or sending the tensor takes."""
        return product((*self.shape, sympy.Integer(self.dtype.itemsize)))

    @property
    def storage_bytes(self) -> sympy.Expr:
        """Bytes of the memory behind the tensor, which reading or writing all of it moves."""
        return product((*self.stored_shape, sympy.Integer(self.dtype.itemsize)))


def tensor_sizes(value: object) -> tuple[TensorSize, ...]:
    """Sizes of the tensors in ``value``: a tensor, or tuples and lists of them; anything else has none."""
    if isinstance(value, torch.Tensor):
        return (_size(value),)
    if isinstance(value, tuple | list):
        return tuple(size for item in value for size in tensor_sizes(item))
    return ()


def _size(tensor: torch.Tensor) -> TensorSize:
    shape = tuple(sympy.sympify(dim) for dim in tensor.shape)
    strides = map(sympy.sympify, tensor.stride())
    stored = tuple(dim for dim, stride in zip(shape, strides, strict=True) if stride != 0)
    return TensorSize(shape, stored, tensor.dtype)


@lru_cache(_CACHE)
def substitute_symbols(expression: sympy.Expr, substitutions: SymbolSubstitutions) -> sympy.Expr:
    """``expression`` in ``MICROBATCH`` alone, the symbols of the graph replaced by ``substitutions``."""
    return expression.xreplace(dict(substitutions))


@lru_cache(_CACHE)
def product(factors: tuple[sympy.Expr, ...]) -> sympy.Expr:
    return sympy.Mul(*factors)


def total(terms: Iterable[sympy.Expr]) -> sympy.Expr:
    return _total(tuple(terms))


@lru_cache(_CACHE)
def _total(terms: tuple[sympy.Expr, ...]) -> sympy.Expr:
    return sympy.Add(*terms)


@lru_cache(_CACHE)
def evaluate_cost(expression: sympy.Expr, microbatch_size: int) -> int:
    """The value of a cost. PlanError if it depends on anything but the microbatch size."""
    value = expression.xreplace({MICROBATCH: sympy.Integer(microbatch_size)})
    if value.free_symbols:
        unknown = ", ".join(sorted(map(str, value.free_symbols)))
        raise PlanError(
            f"the cost {expression} depends on {unknown}, not on the microbatch size b alone: "
            f"capture the model with no dynamic dimension but the batch"
        )
    return int(value)
