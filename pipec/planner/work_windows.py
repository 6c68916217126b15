"""Bounds on the downsets of a graph that has too many to list, for a bound over all plans.

Every downset holds between no and all seconds of work. Windows divide this range, and each downset falls into
one of them. An operator is in every downset of a window if those without it hold too little work, and in none
if its ancestors alone hold too much. What crosses a downset of the window is at least a minimum cut between
the operators that are in all of them and the operators that are in none::

    a -> b -> d      seconds 1, 4, 4, 1; downsets that hold 5 to 7 seconds
    a -> c -> d      a is in all of them (without it nothing is), d in none; so b or c is cut off from d
"""

from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

from pipec.planner.linear_orders import WideGraph

_NUM_WINDOWS = 500

_INFINITE = 2**30
"""A capacity that no cut of values reaches."""


@dataclass(frozen=True, slots=True)
class WorkWindows:
    """``least[c, w]`` and ``most[c, w]`` of each column that a downset in window w holds.

    ``cuts[w]``: values that take at least so many seconds cross it. The first window is the empty downset,
    and the last one the whole.
    """

    least: NDArray[np.float64]
    most: NDArray[np.float64]
    cuts: NDArray[np.float64]


def work_windows(graph: WideGraph, columns: NDArray[np.float64]) -> WorkWindows:
    """``columns[c, op]``, of which the first is the seconds. Operators are numbered in a permitted order."""
    ancestors = _ancestors(graph)
    total = float(graph.seconds.sum())
    until, after = ancestors @ graph.seconds, ancestors.T @ graph.seconds
    edges = np.linspace(0.0, total, _NUM_WINDOWS + 1)
    inside = total - after < edges[:-1, None]
    outside = until > edges[1:, None]
    cut = _MinimumCut(graph)
    cuts = [cut.least(*window) for window in zip(inside, outside, strict=True)]
    whole = columns.sum(axis=1, keepdims=True)
    nothing = np.zeros_like(whole)
    least, most = columns @ inside.T, whole - columns @ outside.T
    least[0], most[0] = np.maximum(least[0], edges[:-1]), np.minimum(most[0], edges[1:])
    return WorkWindows(
        np.concatenate([nothing, least, whole], axis=1),
        np.concatenate([nothing, most, whole], axis=1),
        np.array([0.0, *cuts, 0.0]),
    )


def _ancestors(graph: WideGraph) -> NDArray[np.bool_]:
    """At [v, u], whether operator u is operator v or must come before it."""
    ancestors = np.eye(len(graph.seconds), dtype=bool)
    for u, v in sorted(graph.before, key=lambda pair: pair[1]):
        ancestors[v] |= ancestors[u]
    return ancestors


class _MinimumCut:
    """A flow network whose cuts are downsets: the operators on the side of the source.

    An edge that cannot be cut keeps predecessors on the side of the source. A value has two nodes, and the
    edge between them has the seconds of the value as its capacity. It is cut if some operators of the value
    are on one side and some on the other::

        source -> maker -> value in -- seconds --> value out -> maker, reader        reader -> maker
                  reader -> value in                            reader -> sink
    """

    def __init__(self, graph: WideGraph) -> None:
        count, num_values = len(graph.seconds), len(graph.ends)
        self.source, self.sink = count + 2 * num_values, count + 2 * num_values + 1
        self.unit = max(float(graph.value_seconds.sum()), 1e-300) / (_INFINITE - num_values - 1)
        edges = [(v, u, _INFINITE) for u, v in dict.fromkeys(graph.before)]
        for value, (ends, seconds) in enumerate(zip(graph.ends, graph.value_seconds.tolist(), strict=True)):
            enters, leaves = count + 2 * value, count + 2 * value + 1
            edges.append((enters, leaves, int(seconds / self.unit)))
            edges += [edge for op in ends for edge in ((op, enters, _INFINITE), (leaves, op, _INFINITE))]
        self.edges = np.array(edges, dtype=np.int64).reshape(-1, 3)

    def least(self, inside: NDArray[np.bool_], outside: NDArray[np.bool_]) -> float:
        """The least seconds that cross a downset with all operators of ``inside`` and none of ``outside``."""
        if not (inside.any() and outside.any()):
            return 0.0
        ends = [(self.source, op, _INFINITE) for op in np.flatnonzero(inside).tolist()]
        ends += [(op, self.sink, _INFINITE) for op in np.flatnonzero(outside).tolist()]
        tails, heads, capacities = np.concatenate([self.edges, ends]).T
        size = self.sink + 1
        network = scipy.sparse.csr_array((capacities.astype(np.int32), (tails, heads)), shape=(size, size))
        return float(
            scipy.sparse.csgraph.maximum_flow(network, self.source, self.sink).flow_value * self.unit
        )
