"""Where a tensor holds the rows of the batch: which dimension is split, and what is merged with it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """The dimension ``dim`` of a tensor, of size outer * rows * inner, where rows is that of the batch.

    The element at index i of the dimension belongs to row ``(i // inner) % rows``. An ``outer`` or ``inner``
    of 0 is not known beforehand: it is what the size and the rows leave, such as the length of sequences.
    """

    dim: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def is_leading(self) -> bool:
        """Whether the rows are dimension 0 alone, so that a tensor is split as it is."""
        return self == LEADING

    def rows(self, shape: Sequence[int]) -> int | None:
        """The rows of a tensor of this shape; None if another tensor must tell them."""
        beside = self.outer * self.inner
        return int(shape[self.dim]) // beside if beside else None

    def fits(self, shape: Sequence[int], rows: int) -> bool:
        """Whether a tensor of this shape has so many rows there."""
        if len(shape) <= self.dim:
            return False
        beside = self.outer * self.inner
        if beside:
            return shape[self.dim] == beside * rows
        return rows > 0 and shape[self.dim] % (rows * max(self.outer, self.inner)) == 0

    def rows_first(self, tensor: Any, rows: int) -> Any:
        """A view with the rows as dimension 0. What is merged with them becomes dimensions of their own."""
        return tensor.view(self.unmerged_shape(tensor.shape, rows)).movedim(self.dim + self.has_outer, 0)

    def unmerged_shape(self, shape: Sequence[Any], rows: Any) -> list[Any]:
        """The shape in which the rows, and what they are merged with, are dimensions of their own."""
        beside = shape[self.dim] // (rows * max(self.outer, self.inner)) if self.num_merged else 1
        sizes = [self.outer or beside] * self.has_outer + [rows] + [self.inner or beside] * self.has_inner
        return [*shape[: self.dim], *sizes, *shape[self.dim + 1 :]]

    def restore(self, tensor: Any) -> Any:
        """The inverse of ``rows_first``, for any number of rows: a view where one can be."""
        moved = tensor.movedim(0, self.dim + self.has_outer)
        return moved.flatten(self.dim, self.dim + self.num_merged) if self.num_merged else moved

    def restored_shape(self, shape: Sequence[int | str]) -> tuple[int | str, ...]:
        """The shape of what ``restore`` makes of a tensor of this shape."""
        rows, before, rest = shape[0], shape[1 : 1 + self.dim], list(shape[1 + self.dim :])
        merged, after = rest[: self.num_merged], rest[self.num_merged :]
        merged.insert(self.has_outer, rows)
        return (*before, _product(merged), *after)

    def dim_name(self, dim: int) -> str:
        """What a person would call a dimension after the first of the tensor that ``rows_first`` returns."""
        if self.dim < dim <= self.dim + self.num_merged:
            return f"what is beside the batch in dimension {self.dim}"
        return f"dimension {dim - 1 if dim <= self.dim else dim - self.num_merged}"

    @property
    def has_outer(self) -> bool:
        return self.outer != 1

    @property
    def has_inner(self) -> bool:
        return self.inner != 1

    @property
    def num_merged(self) -> int:
        """How many dimensions are merged with the batch's."""
        return self.has_outer + self.has_inner


LEADING = BatchAxis()
"""Dimension 0 is the batch."""


def _product(sizes: Sequence[int | str]) -> int | str:
    """``35*b``, or a number."""
    if all(isinstance(size, int) for size in sizes):
        return math.prod(map(int, sizes))
    return "*".join(str(size) if len(sizes) == 1 or str(size).isalnum() else f"({size})" for size in sizes)
