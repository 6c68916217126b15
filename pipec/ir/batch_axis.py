"""The batch axis of a tensor: the dimension that is split, and the dimensions that are merged with it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """Dimension ``dim`` of a tensor, of size outer * rows * inner, where rows is the size of the batch.

    The element at index i of the dimension belongs to row ``(i // inner) % rows``. An ``outer`` or ``inner``
    of 0 is not known beforehand, such as the length of sequences: it follows from the size and the rows.
    """

    dim: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def is_leading(self) -> bool:
        """Whether the rows are dimension 0 alone, so that a tensor is split as it is."""
        return self == LEADING

    def rows(self, shape: Sequence[int]) -> int | None:
        """The rows of a tensor of this shape; None if they do not follow from it."""
        beside = self.outer * self.inner
        return int(shape[self.dim]) // beside if beside else None

    def fits(self, shape: Sequence[int], rows: int) -> bool:
        """Whether a tensor of this shape has this number of rows."""
        if len(shape) <= self.dim:
            return False
        beside = self.outer * self.inner
        if beside:
            return shape[self.dim] == beside * rows
        return rows > 0 and shape[self.dim] % (rows * max(self.outer, self.inner)) == 0

    def rows_first(self, tensor: Any, rows: int) -> Any:
        """A view with the rows as dimension 0. Dimensions merged with them become separate ones."""
        return tensor.view(self.unmerged_shape(tensor.shape, rows)).movedim(self.dim + self.has_outer, 0)

    def unmerged_shape(self, shape: Sequence[Any], rows: Any) -> list[Any]:
        """The shape in which the rows, and the dimensions merged with them, are separate dimensions."""
        beside = shape[self.dim] // (rows * max(self.outer, self.inner)) if self.num_merged else 1
        sizes = [self.outer or beside] * self.has_outer + [rows] + [self.inner or beside] * self.has_inner
        return [*shape[: self.dim], *sizes, *shape[self.dim + 1 :]]

    def restore(self, tensor: Any) -> Any:
        """The inverse of ``rows_first``, for any number of rows: a view if possible."""
        moved = tensor.movedim(0, self.dim + self.has_outer)
        return moved.flatten(self.dim, self.dim + self.num_merged) if self.num_merged else moved

    def restored_shape(self, shape: Sequence[int | str]) -> tuple[int | str, ...]:
        """The shape that ``restore`` gives to a tensor of this shape."""
        rows, before, rest = shape[0], shape[1 : 1 + self.dim], list(shape[1 + self.dim :])
        merged, after = rest[: self.num_merged], rest[self.num_merged :]
        merged.insert(self.has_outer, rows)
        return (*before, _product(merged), *after)

    def dim_name(self, dim: int) -> str:
        """The user's name for a dimension, except the first, of the tensor that ``rows_first`` returns."""
        given = self.given_dim(dim)
        return f"{'what is beside the batch in ' * (given == self.dim)}dimension {given}"

    def given_dim(self, dim: int) -> int:
        """The user's dimension that holds a dimension, except the first, of what ``rows_first`` returns."""
        if self.dim < dim <= self.dim + self.num_merged:
            return self.dim
        return dim - 1 if dim <= self.dim else dim - self.num_merged

    @property
    def has_outer(self) -> bool:
        return self.outer != 1

    @property
    def has_inner(self) -> bool:
        return self.inner != 1

    @property
    def num_merged(self) -> int:
        """How many dimensions are merged with the batch dimension."""
        return self.has_outer + self.has_inner


LEADING = BatchAxis()
"""Dimension 0 is the batch."""


def _product(sizes: Sequence[int | str]) -> int | str:
    """``35*b``, or a number."""
    if all(isinstance(size, int) for size in sizes):
        return math.prod(map(int, sizes))
    return "*".join(str(size) if len(sizes) == 1 or str(size).isalnum() else f"({size})" for size in sizes)
