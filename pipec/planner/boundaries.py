"""Where a stage may begin and end: sets of operators that contain all their predecessors.

A plan is a chain of such downsets, from the empty one to the whole, and each stage is the difference of two.
Of operators in one line there are n + 1; a graph with branches has more, in principle exponentially many.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipec.errors import PlanError
from pipec.planner.workload import COLUMNS, Workload

MOST_BOUNDARIES = 2_000_000
"""More than this would not fit in memory."""

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Boundaries:
    """B boundaries, the empty one first and the whole last; a subset comes before what it is a subset of.

    ``order`` lists the operators, and ``ends``, for each value, the places of those that make or read it.
    ``before`` pairs places in it: what comes first in a pair is before any boundary that the other is before.
    ``sizes[b]`` counts the operators before boundary b. ``members[k, b]`` says whether the k-th is; None if
    they are always the first in order. ``totals`` sums each of COLUMNS over the operators before b, ``cuts``
    the seconds of the values that cross b, one row a level.
    """

    order: Sequence[int]
    before: Sequence[tuple[int, int]]
    ends: Sequence[Sequence[int]]
    sizes: NDArray[np.intp]
    members: Mask | None
    totals: Vector
    cuts: Vector

    @property
    def is_line(self) -> bool:
        return self.members is None

    def __len__(self) -> int:
        return int(self.totals.shape[1])

    def take(self, kept: NDArray[np.intp]) -> "Boundaries":
        members = None if self.members is None else self.members[:, kept]
        totals, cuts = self.totals[:, kept], self.cuts[:, kept]
        return Boundaries(self.order, self.before, self.ends, self.sizes[kept], members, totals, cuts)

    def holds(self) -> Mask:
        """``members``, written out where it is None."""
        return np.arange(len(self.order))[:, None] < self.sizes if self.members is None else self.members

    def between(self, first: int, last: int) -> tuple[int, ...]:
        """The operators of the stage that begins at one boundary and ends at the other, in order."""
        if self.members is None:
            return tuple(self.order[self.sizes[first] : self.sizes[last]])
        inside = self.members[:, last] & ~self.members[:, first]
        return tuple(self.order[k] for k in np.flatnonzero(inside).tolist())


def boundaries(workload: Workload, order: Sequence[int], value_seconds: Vector) -> Boundaries:
    """Every boundary there is. ``value_seconds[level, transfer]``. PlanError if there are too many."""
    position = {op: k for k, op in enumerate(order)}
    ends = [
        sorted({position[op] for op in (transfer.producer, *transfer.consumers)})
        for transfer in workload.transfers
    ]
    before = [(position[u], position[v]) for u, v in workload.before]
    columns = np.array([getattr(workload, column) for column in COLUMNS], dtype=np.float64)[:, order]
    if is_line(workload, order):
        totals = np.concatenate([np.zeros((len(COLUMNS), 1)), np.cumsum(columns, axis=1)], axis=1)
        cuts = line_cuts(ends, value_seconds, len(order) + 1)
        return Boundaries(order, before, ends, np.arange(len(order) + 1), None, totals, cuts)
    members = _downsets(before, len(order))
    totals, cuts = _totals(columns, members), _cuts(ends, value_seconds, members)
    return Boundaries(order, before, ends, members.sum(axis=0, dtype=np.intp), members, totals, cuts)


def is_line(workload: Workload, order: Sequence[int]) -> bool:
    """Whether every operator must follow the one before it in ``order``, so that there is no other order."""
    before = set(workload.before)
    return all(pair in before for pair in pairwise(order))


def line_cuts(ends: Sequence[Sequence[int]], value_seconds: Vector, num_boundaries: int) -> Vector:
    """``cuts`` of all boundaries of operators in one line."""
    cuts = np.zeros((len(value_seconds), num_boundaries + 1))
    first = np.array([value[0] + 1 for value in ends], dtype=np.intp)
    behind = np.array([value[-1] + 1 for value in ends], dtype=np.intp)
    for level, seconds in enumerate(value_seconds):
        np.add.at(cuts[level], first, seconds)
        np.add.at(cuts[level], behind, -seconds)
    return np.cumsum(cuts, axis=1)[:, :-1]


def _downsets(before: Sequence[tuple[int, int]], num_operators: int) -> Mask:
    """All downsets, one a column, by size. Each operator in turn joins those that have its predecessors."""
    num_words = -(-num_operators // 64)
    needs = np.zeros((num_operators, num_words), dtype="<u8")
    for u, v in before:
        needs[v, u // 64] |= np.uint64(1 << (u % 64))
    found, count = np.zeros((1024, num_words), dtype="<u8"), 1
    for op in range(num_operators):
        able = np.ones(count, dtype=bool)
        for word in np.flatnonzero(needs[op]):
            able &= (found[:count, word] & needs[op, word]) == needs[op, word]
        larger = found[:count][able]
        larger[:, op // 64] |= np.uint64(1 << (op % 64))
        found = _with_room(found, count, len(larger), num_operators)
        found[count : count + len(larger)] = larger
        count += len(larger)
    bits = np.unpackbits(found[:count].view(np.uint8), axis=1, count=num_operators, bitorder="little")
    by_size = np.argsort(bits.sum(axis=1, dtype=np.intp), kind="stable")
    return np.ascontiguousarray(bits[by_size].T).view(np.bool_)


def _with_room(found: NDArray[Any], count: int, more: int, num_operators: int) -> NDArray[Any]:
    if count + more > MOST_BOUNDARIES:
        raise PlanError(
            f"{num_operators} operators can be cut in more than {MOST_BOUNDARIES} places, too many to "
            f"search: too many of them are independent of each other. Order them, by edges "
            f"between branches that need not be on different devices"
        )
    if count + more <= len(found):
        return found
    return np.concatenate([found, np.zeros((count + more, found.shape[1]), dtype=found.dtype)])


def _totals(columns: Vector, members: Mask) -> Vector:
    """A matrix product in slices: the members as floats would need eight times their memory."""
    slices = [columns @ members[:, b : b + 4096].astype(float) for b in range(0, members.shape[1], 4096)]
    return np.concatenate(slices, axis=1)


def _cuts(ends: Sequence[Sequence[int]], value_seconds: Vector, members: Mask) -> Vector:
    cuts = np.zeros((len(value_seconds), members.shape[1]))
    for value, seconds in zip(ends, value_seconds.T, strict=True):
        crosses = members[value].any(axis=0) & ~members[value].all(axis=0)
        cuts += np.outer(seconds, crosses)
    return cuts
