"""An operator call on meta tensors, and how its arguments depend on the batch."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipec.capture.batch.dependence import Dependence, MixedRows, PerRow, Unproven, Whole
from pipec.torch_compat import pytree
from pipec.torch_compat.run_time import OpOverload, schema

_FEWEST_ROWS_OF_PAIRS = 64
"""A size that is more than the square of the number of rows by this share grows with it, as ``pdist``'s."""

ROW_COUNT_PRIME = 1_000_003
"""The rows of a microbatch, in the analysis: a prime that no size of a model is a multiple of.

A number that is one comes from the number of rows. Tensors on the meta device have no memory, whatever their
size.
"""


class NeedsMeanError(Exception):
    """Sums over the rows of a microbatch must first be divided by its fraction of the rows."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors


@dataclass
class OperatorCall:
    """A call of ``op`` whose result, on the meta device, is ``result``.

    ``rows`` is the number that stands for the rows of a microbatch. ``degrees`` has the powers of it in
    numbers that are no multiples of it, such as 1 / rows.
    """

    op: OpOverload
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any
    dependence_of: Callable[[Tensor], Dependence]
    rows: int
    symbolic: bool
    degrees: Mapping[float, int] = field(default_factory=dict)
    is_assumed: bool = False
    """The results were taken to have rows, without a proof."""

    @property
    def name(self) -> str:
        """``add`` for ``aten::add_.Tensor`` too."""
        return plain_name_of(self.op)

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the schema."""
        return self.arguments[name]

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        named = dict(zip(argument_names(self.op), self.args, strict=False))
        return {**defaults_of(self.op), **named, **self.kwargs}

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        return tensors_in((self.args, dict(self.kwargs)))

    @functools.cached_property
    def numbers(self) -> list[Any]:
        leaves = _leaves((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, int | float) and not isinstance(leaf, bool)]

    @functools.cached_property
    def values(self) -> list[Dependence]:
        return [self.dependence_of(tensor) for tensor in self.tensors]

    @property
    def first(self) -> Tensor:
        return self.tensors[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of the first result."""
        result = self.result[0] if isinstance(self.result, tuple | list) else self.result
        assert isinstance(result, Tensor)
        return result.shape

    def degree(self, number: Any) -> int | None:
        """The power of the number of rows in a number; None if it may be one by chance."""
        return degree_of(number, self.rows, self.degrees, self.symbolic)

    def is_row_multiple(self, size: int) -> bool:
        """Whether a size comes from the number of rows."""
        return size >= self.rows and size % self.rows == 0

    def mixed(self, why: str) -> MixedRows:
        return MixedRows(why)

    def unproven(self, why: str = "") -> Unproven:
        return Unproven(why or f"calls {self.op}, of which pipec does not know what it does to rows")

    def assumed(self) -> Dependence | tuple[Dependence, ...]:
        """The likely answer where no rule gives one: each row is computed by itself.

        Each result then has the rows along the one dimension that grows with the batch.
        """
        if not self.symbolic:
            return self.unproven()
        results = tensors_in(self.result)
        dims = [[dim for dim, size in enumerate(x.shape) if self.is_row_multiple(size)] for x in results]
        largest = max((size for x in results for size in x.shape), default=0)
        if any(len(each) > 1 for each in dims) or largest > self.rows**2 / _FEWEST_ROWS_OF_PAIRS:
            return self.mixed("makes something for every pair of rows")
        known = [v for v in self.values if not isinstance(v, Unproven)]
        is_plain = all(isinstance(v, PerRow | Whole) and not v.degree for v in known)
        has_rows = per_row_among(known) or len(known) < len(self.values)
        if not is_plain or not has_rows or any(len(each) != 1 for each in dims):
            return self.unproven()
        self.is_assumed = True
        return tuple(
            PerRow(dim, inner=x.shape[dim] // self.rows) for x, (dim,) in zip(results, dims, strict=True)
        )

    @property
    def has_row_numbers(self) -> bool:
        """Whether an argument numbers the rows, from the first one of the microbatch on."""
        return any(isinstance(value, PerRow) and value.is_row_number for value in self.values)

    def with_row_numbers(self) -> MixedRows:
        return self.mixed(
            "computes with the numbers of rows, which a microbatch counts from its own first one; pass them "
            "to step as an argument, one for each row"
        )


def degree_of(number: Any, rows: int, degrees: Mapping[float, int], symbolic: bool) -> int | None:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return 0
    if number in degrees:
        return degrees[number]
    if not symbolic:
        return None if abs(number) > 1 and number % rows == 0 and rows > 1 else 0
    degree = 0
    while isinstance(number, int) and number and number % rows == 0:
        degree, number = degree + 1, number // rows
    return degree


@functools.cache
def plain_name_of(op: OpOverload) -> str:
    namespace, name = schema(op).name.split("::")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return name if namespace == "aten" else f"{namespace}::{name}"


@functools.cache
def functional_of(op: OpOverload) -> OpOverload:
    """The operator itself, or the one that makes a new tensor where it writes into its first argument."""
    packet = getattr(torch.ops.aten, plain_name_of(op), None) if schema(op).is_mutable else None
    return getattr(packet, schema(op).overload_name or "default", op)


@functools.cache
def argument_names(op: OpOverload) -> list[str]:
    return [argument.name for argument in schema(op).arguments]


@functools.cache
def defaults_of(op: OpOverload) -> dict[str, Any]:
    return {argument.name: argument.default_value for argument in schema(op).arguments}


@functools.cache
def is_pointwise(op: OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, Tensor)]


def _leaves(tree: Any) -> list[Any]:
    """As ``pytree.tree_leaves``, which takes ten times as long for a tuple of tensors and numbers."""
    if type(tree) in (tuple, list):
        return [leaf for part in tree for leaf in _leaves(part)]
    if type(tree) is dict:
        return [leaf for part in tree.values() for leaf in _leaves(part)]
    is_leaf = tree is None or isinstance(tree, Tensor | int | float | str)
    return [tree] if is_leaf else pytree.tree_leaves(tree)


def truncates(source: Tensor, result: Tensor) -> bool:
    """Whether a conversion does more than round: to integers, to truth values, or to integers of few bits."""
    if result.is_floating_point() or result.is_complex() or source.dtype is result.dtype:
        return False
    has_fractions = source.is_floating_point() or source.is_complex()
    return has_fractions or result.dtype is torch.bool or result.itemsize < min(source.itemsize, 4)


Rule = Callable[[OperatorCall], Dependence | tuple[Dependence, ...]]
"""What an operator makes of its arguments: one value for all results, or one for each."""


def mixed_or_unproven(values: Sequence[Dependence]) -> MixedRows | Unproven | None:
    """The first value that mixes rows, else the first that is unproven."""
    unproven = next((value for value in values if isinstance(value, Unproven)), None)
    return next((value for value in values if isinstance(value, MixedRows)), unproven)


def per_row_among(values: Sequence[Dependence]) -> list[PerRow]:
    return [value for value in values if isinstance(value, PerRow)]
