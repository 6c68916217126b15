"""How a value of a microbatch relates to that of the whole mini-batch.

Let the batch of N rows be divided into microbatches of n rows, each with a share n / N. A value of the
captured forward is one of these:

================  =================================================================================
``Whole``         the same for every microbatch: parameters, constants, values without rows
``PerRow``        row by row: concatenating microbatch values along a dimension gives the batch's
``SumOverRows``   the batch's value is the sum over microbatches
``SelectedRows``  rows that values choose
``MixedRows``     proved to depend on other rows of the batch, in a way that microbatches cannot make up for
``Unproven``      no rule covers it
================  =================================================================================

A ``degree`` counts factors of the number of rows: a mean is a sum with degree -1, whose batch value is the
mean of the microbatches' values, each weighted with its share. Only a sum of degree -1 is a loss as it is.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Whole:
    """The same for every microbatch, times the number of rows to the power of ``degree``.

    ``fill`` is the number that all its elements are, if they are known to be equal.
    """

    degree: int = 0
    fill: float | None = None


@dataclass(frozen=True, slots=True)
class PerRow:
    """Row by row along dimension ``dim``, whose size is ``outer`` * rows * ``inner``.

    Index i along it belongs to row (i // ``inner``) % rows. ``is_row_number``: the values are themselves the
    numbers of the rows, counted from the first of the microbatch, by which each row is looked up in itself.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    degree: int = 0
    is_row_number: bool = False

    def at(self, dim: int) -> "PerRow":
        """The same rows along another dimension."""
        return replace(self, dim=dim)


@dataclass(frozen=True, slots=True)
class SumOverRows:
    """A sum over rows, times the number of rows to the power of ``degree``."""

    degree: int = 0


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """Selected by values, as in ``x[mask]``; ``are_indices``: the values are the indices of those rows."""

    are_indices: bool = False


@dataclass(frozen=True, slots=True)
class MixedRows:
    """Depends on several rows. ``why`` completes the sentence "this line ..."."""

    why: str


@dataclass(frozen=True, slots=True)
class Unproven:
    """No rule covers it. ``why`` completes the sentence "this line ..."."""

    why: str


Dependence: TypeAlias = Whole | PerRow | SumOverRows | SelectedRows | MixedRows | Unproven

MEAN = SumOverRows(-1)


def power_of(value: Dependence) -> int:
    """The degree of a value; 0 for one that has none."""
    return value.degree if isinstance(value, Whole | PerRow | SumOverRows) else 0


def is_whole(value: Dependence) -> bool:
    """Whether a value is the same for every microbatch, whatever their number of rows."""
    return isinstance(value, Whole) and not value.degree
