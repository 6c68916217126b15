"""The recomputed seconds and saved bytes of a stage, at different prices of memory.

At a price there is no limit, and the program of ``planner/recompute_solver.py`` is a smallest cut of a
network.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy

from pipec.planner.recompute_solver import GAP, StageValues, needed_recomputes, saved_values

_TIE = 1e-6
"""Where bytes alone count, the share of them that all seconds weigh: of equal bytes, less is recomputed."""

_ALL_COSTS, _NEVER = 2**29, 2**30
"""Capacities are integers: that of all costs together, and one that no flow reaches."""


@functools.lru_cache(maxsize=16)
def recompute_curve(stage: StageValues, most: int) -> tuple[frozenset[int], ...]:
    """What to replay at up to ``most`` prices of a saved byte: the corners of the curve of seconds and bytes.

    It begins with nothing and ends with what saves least. No choice has both fewer seconds and fewer bytes
    than a point on a line between neighbours.
    """
    ends = (
        _Corner.of(stage, recomputes_at_price(stage, 0.0)),
        _Corner.of(stage, recomputes_at_price(stage, math.inf)),
    )
    corners, pairs = dict.fromkeys(ends), [ends]
    while pairs and len(corners) < most:
        pairs.sort(key=_area)
        low, high = pairs.pop()
        if low.saved > high.saved and high.seconds > low.seconds:
            price = (high.seconds - low.seconds) / (low.saved - high.saved)
            between = _Corner.of(stage, recomputes_at_price(stage, price))
            if between.seconds + price * between.saved < (low.seconds + price * low.saved) * (1 - GAP):
                corners[between] = None
                pairs += [(low, between), (between, high)]
    return tuple(corner.recomputed for corner in sorted(corners, key=lambda each: -each.saved))


def recomputes_at_price(stage: StageValues, price: float) -> frozenset[int]:
    """The values that a stage recomputes if each saved byte costs ``price`` seconds.

    A minimum cut. The network has a node for recomputing each value, and a node for needing it. Nodes on the
    side of the source are chosen; an edge that is never cut leads from a node to every node that it requires.
    """
    count = len(stage)
    seconds = np.array([value.seconds for value in stage])
    sizes = np.array([value.num_bytes * value.may_save for value in stage])
    time, space = (1.0, price) if price < math.inf else (_TIE * sizes.sum() / (seconds.sum() or 1.0), 1.0)
    costs = np.concatenate([time * seconds - space * sizes, space * sizes])
    costs = np.rint(_ALL_COSTS / (np.abs(costs).sum() or 1.0) * costs)
    source, sink = 2 * count, 2 * count + 1
    edges = dict.fromkeys(_asking(stage), _NEVER)
    for node, cost in enumerate(costs.tolist()):
        edges[(node, sink) if cost > 0 else (source, node)] = int(abs(cost))
    edges |= {(source, count + v): _NEVER for v, value in enumerate(stage) if value.is_needed}
    edges |= {(v, sink): _NEVER for v, value in enumerate(stage) if not value.is_recomputable}
    ends = np.array(list(edges), np.int32)
    capacities = np.fromiter(edges.values(), np.int32)
    network = scipy.sparse.csr_array((capacities, (ends[:, 0], ends[:, 1])), shape=(sink + 1, sink + 1))
    left = network - scipy.sparse.csgraph.maximum_flow(network, source, sink).flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    reached = scipy.sparse.csgraph.breadth_first_order(left, source, return_predecessors=False)
    return needed_recomputes(stage, frozenset(v for v in reached.tolist() if v < count))


def _asking(stage: StageValues) -> Iterator[tuple[int, int]]:
    """A replay asks for its own value and its inputs, and what cannot be saved for its replay."""
    count = len(stage)
    for v, value in enumerate(stage):
        yield from ((v, count + u) for u in (v, *value.inputs))
        if not value.may_save:
            yield count + v, v


@dataclass(frozen=True, slots=True)
class _Corner:
    """A choice with its seconds and the bytes that it saves."""

    recomputed: frozenset[int]
    seconds: float
    saved: float

    @classmethod
    def of(cls, stage: StageValues, recomputed: frozenset[int]) -> "_Corner":
        seconds = sum(stage[v].seconds for v in sorted(recomputed))
        return cls(recomputed, seconds, sum(stage[v].num_bytes for v in saved_values(stage, recomputed)))


def _area(pair: tuple[_Corner, _Corner]) -> float:
    """The area in which the curve may lie between two neighbours."""
    low, high = pair
    return (low.saved - high.saved) * (high.seconds - low.seconds)
