"""Splits a stage into segments that can be recomputed separately."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipec.planner.recompute_solver import ForwardValue, StageValues


def split_into_segments(stage: StageValues, count: int) -> list[tuple[int, StageValues]]:
    """The stage in up to ``count`` consecutive segments of about as many bytes, each with its first position.

    Values that a segment reads from earlier ones are always saved. So no segment needs another to be
    recomputed, and boundaries are placed where few bytes cross.
    """
    firsts = segment_boundaries(stage, count)
    crosses = values_across(stage, firsts)
    pieces = itertools.pairwise([*firsts, len(stage)])
    return [
        (first, tuple(_of_segment(stage[v], first, v in crosses) for v in range(first, end)))
        for first, end in pieces
    ]


def segment_boundaries(stage: StageValues, count: int) -> list[int]:
    """The first position of each segment of a stage."""
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


def values_across(stage: StageValues, firsts: Sequence[int]) -> frozenset[int]:
    """The values that a segment reads from earlier segments."""
    return frozenset(
        u
        for first, end in itertools.pairwise([*firsts, len(stage)])
        for v in range(first, end)
        for u in stage[v].inputs
        if u < first
    )


def _of_segment(value: ForwardValue, first: int, crosses: bool) -> ForwardValue:
    if crosses:
        return replace(value, inputs=(), is_needed=True, is_recomputable=False)
    return replace(value, inputs=tuple(u - first for u in value.inputs if u >= first))


def _crossing_bytes(stage: StageValues) -> NDArray[np.float64]:
    """The bytes that each position and later ones read of earlier ones; infinite if one may not be saved."""
    last = {u: v for v, value in enumerate(stage) for u in value.inputs}
    crossing = np.zeros(len(stage) + 1)
    for u, v in last.items():
        crossing[u + 1 : v + 1] += stage[u].num_bytes if stage[u].may_save else math.inf
    return crossing
