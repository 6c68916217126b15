"""A stage in segments, each of which can be replayed by itself."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipec.planner.recompute import Stage, Value


def segments(stage: Stage, count: int) -> list[tuple[int, Stage]]:
    """The stage in up to ``count`` consecutive segments of about as many bytes, each with its first position.

    What a segment reads of those before it is always saved. So what is replayed for one segment needs no
    other, and the boundaries are where little is read across.
    """
    firsts = boundaries(stage, count)
    crosses = crossing(stage, firsts)
    pieces = itertools.pairwise([*firsts, len(stage)])
    return [
        (first, tuple(_of_segment(stage[v], first, v in crosses) for v in range(first, end)))
        for first, end in pieces
    ]


def boundaries(stage: Stage, count: int) -> list[int]:
    """Where segments of a stage begin: the first position of each."""
    sizes = np.cumsum([value.num_bytes * value.is_needed for value in stage])
    across, firsts = _crossing_bytes(stage), [0]
    for number in range(1, count):
        around = np.array([number - 0.5, number + 0.5]) / count * sizes[-1]
        low, high = np.searchsorted(sizes, around).tolist()
        within = range(max(low, firsts[-1] + 1), min(high, len(stage)))
        best = min(within, key=lambda first: across[first], default=0)
        if best and across[best] < math.inf:
            firsts.append(best)
    return firsts


def crossing(stage: Stage, firsts: Sequence[int]) -> frozenset[int]:
    """The values that a segment reads of those before it."""
    return frozenset(
        u
        for first, end in itertools.pairwise([*firsts, len(stage)])
        for v in range(first, end)
        for u in stage[v].inputs
        if u < first
    )


def _of_segment(value: Value, first: int, crosses: bool) -> Value:
    if crosses:
        return replace(value, inputs=(), is_needed=True, may_replay=False)
    return replace(value, inputs=tuple(u - first for u in value.inputs if u >= first))


def _crossing_bytes(stage: Stage) -> NDArray[np.float64]:
    """The bytes that each position and later ones read of earlier ones; infinite if one cannot be saved."""
    last = {u: v for v, value in enumerate(stage) for u in value.inputs}
    crossing = np.zeros(len(stage) + 1)
    for u, v in last.items():
        crossing[u + 1 : v + 1] += stage[u].num_bytes if stage[u].may_save else math.inf
    return crossing
