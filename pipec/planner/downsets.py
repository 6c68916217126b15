"""The possible ends of stages: downsets, sets of operators that contain all their predecessors.

A plan is a growing sequence of downsets, from the empty one to the whole, and each stage is the difference of
two neighbours. A chain of n operators has n + 1 downsets, its prefixes. A graph with branches has more::

    a -> b -> d      {}, {a}, {a b}, {a c}, {a b c}, {a b c d}
    a -> c -> d

In principle there are exponentially many. Where there are too many to list, the prefixes of a few linear
orders stand in for them (see ``pipec.planner.linear_orders``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipec.planner.linear_orders import WideGraph, linear_orders
from pipec.planner.operator_graph import COLUMNS, OperatorGraph
from pipec.planner.work_windows import WorkWindows, work_windows

MOST_DOWNSETS = 2_000_000
"""The most downsets that are listed; more would not fit in memory."""

Vector = NDArray[np.float64]
Mask = NDArray[np.bool_]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Downsets:
    """D downsets, from the empty one to the whole, each after all that it contains.

    ``order`` lists the operators. A place is an index into it: ``ends`` has, for each value, the places of
    the operators that make or read it, and ``before`` has the pairs of the graph as places. ``sizes[d]``
    counts the operators of downset d. ``members[k, d]`` tells whether it has the operator at place k;
    ``members`` is None in a chain, where a downset is always the first ``sizes[d]``. ``totals`` sums each of
    COLUMNS over the operators of d, and ``cuts[level, d]`` has the seconds of the values that cross its end::

        operators      0 --- 1 --- 2        seconds 1, 2, 4; values of 5 and 6 seconds
        sizes        0     1     2     3
        totals[0]    0     1     3     7
        cuts[0]      0     5     6     0

    ``windows`` bounds the work of all downsets of the graph, if these are not all of them.
    """

    order: Sequence[int]
    before: Sequence[tuple[int, int]]
    ends: Sequence[Sequence[int]]
    sizes: Indices
    members: Mask | None
    totals: Vector
    cuts: Vector
    windows: "WorkWindows | None" = None

    @property
    def is_chain(self) -> bool:
        return self.members is None

    def __len__(self) -> int:
        return int(self.totals.shape[1])

    def select(self, downsets: Indices) -> "Downsets":
        members = None if self.members is None else self.members[:, downsets]
        totals, cuts = self.totals[:, downsets], self.cuts[:, downsets]
        return Downsets(self.order, self.before, self.ends, self.sizes[downsets], members, totals, cuts)

    def membership(self) -> Mask:
        """``members``, also in a chain."""
        return np.arange(len(self.order))[:, None] < self.sizes if self.members is None else self.members

    def stage_operators(self, first: int, last: int) -> tuple[int, ...]:
        """The operators of the stage from one downset to another, in order."""
        if self.members is None:
            return tuple(self.order[self.sizes[first] : self.sizes[last]])
        inside = self.members[:, last] & ~self.members[:, first]
        return tuple(self.order[k] for k in np.flatnonzero(inside).tolist())


def list_downsets(graph: OperatorGraph, order: Sequence[int], value_seconds: Vector) -> Downsets:
    """All downsets of a graph, or those of some linear orders if there are more than ``MOST_DOWNSETS``.

    ``order`` is one that ``graph.before`` permits; ``value_seconds[level, value]`` is the time of transfers.
    """
    place = {op: k for k, op in enumerate(order)}
    ends = [sorted({place[op] for op in (value.producer, *value.consumers)}) for value in graph.transfers]
    before = [(place[u], place[v]) for u, v in graph.before]
    columns = np.array([getattr(graph, column) for column in COLUMNS], dtype=np.float64)[:, order]
    if is_chain(graph, order):
        totals = np.concatenate([np.zeros((len(COLUMNS), 1)), np.cumsum(columns, axis=1)], axis=1)
        cuts = _cuts_of_chain(ends, value_seconds, len(order) + 1)
        return Downsets(order, before, ends, np.arange(len(order) + 1), None, totals, cuts)
    members, known = _all_downsets(before, len(order)), None
    if members is None:
        wide = WideGraph(columns[0], before, ends, value_seconds.min(axis=0))
        members, known = _prefixes(linear_orders(wide)), work_windows(wide, columns[:2])
    sizes = members.sum(axis=0, dtype=np.intp)
    totals, cuts = _totals(columns, members), _cuts(ends, value_seconds, members)
    return Downsets(order, before, ends, sizes, members, totals, cuts, known)


def is_chain(graph: OperatorGraph, order: Sequence[int]) -> bool:
    """Whether every operator must follow the one before it in ``order``, so that there is no other order."""
    before = set(graph.before)
    return all(pair in before for pair in pairwise(order))


def _cuts_of_chain(ends: Sequence[Sequence[int]], value_seconds: Vector, num_downsets: int) -> Vector:
    """A value crosses every downset from after its first end to its last: prefix sums of differences."""
    cuts = np.zeros((len(value_seconds), num_downsets + 1))
    first = np.array([value[0] + 1 for value in ends], dtype=np.intp)
    behind = np.array([value[-1] + 1 for value in ends], dtype=np.intp)
    for level, seconds in enumerate(value_seconds):
        np.add.at(cuts[level], first, seconds)
        np.add.at(cuts[level], behind, -seconds)
    return np.cumsum(cuts, axis=1)[:, :-1]


def _all_downsets(before: Sequence[tuple[int, int]], num_operators: int) -> Mask | None:
    """All downsets, one a column, by size; None if there are too many.

    Each operator in turn joins all downsets found so far that have its predecessors. A downset is a row of
    bits, 64 to a word::

        a -> b, a -> c      a joins {}       b joins {a}        c joins {a}, {a b}
                            {}, {a}          {}, {a}, {a b}     {}, {a}, {a b}, {a c}, {a b c}
    """
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
        if count + len(larger) > MOST_DOWNSETS:
            return None
        larger[:, op // 64] |= np.uint64(1 << (op % 64))
        found = _with_room(found, count + len(larger))
        found[count : count + len(larger)] = larger
        count += len(larger)
    bits = np.unpackbits(found[:count].view(np.uint8), axis=1, count=num_operators, bitorder="little")
    return _by_size(bits)


def _with_room(rows: NDArray[Any], count: int) -> NDArray[Any]:
    if count <= len(rows):
        return rows
    return np.concatenate([rows, np.zeros((count, rows.shape[1]), dtype=rows.dtype)])


def _prefixes(orders: Sequence[Sequence[int]]) -> Mask:
    """Every prefix of every order, each once, one a column, by size."""
    num_operators = len(orders[0])
    places = np.argsort(np.array(orders), axis=1)  # of each operator in each order
    prefixes = places[:, None, :] < np.arange(num_operators + 1)[:, None]
    packed = np.unique(np.packbits(prefixes.reshape(-1, num_operators), axis=1), axis=0)
    return _by_size(np.unpackbits(packed, axis=1, count=num_operators))


def _by_size(bits: NDArray[np.uint8]) -> Mask:
    by_size = np.argsort(bits.sum(axis=1, dtype=np.intp), kind="stable")
    return np.ascontiguousarray(bits[by_size].T).view(np.bool_)


def _totals(columns: Vector, members: Mask) -> Vector:
    """A matrix product in slices: the members as floats would need eight times their memory."""
    slices = [columns @ members[:, d : d + 4096].astype(float) for d in range(0, members.shape[1], 4096)]
    return np.concatenate(slices, axis=1)


def _cuts(ends: Sequence[Sequence[int]], value_seconds: Vector, members: Mask) -> Vector:
    """A value crosses the end of a downset that has some of the value's ends, but not all."""
    cuts = np.zeros((len(value_seconds), members.shape[1]))
    for value, seconds in zip(ends, value_seconds.T, strict=True):
        crosses = members[value].any(axis=0) & ~members[value].all(axis=0)
        cuts += np.outer(seconds, crosses)
    return cuts
