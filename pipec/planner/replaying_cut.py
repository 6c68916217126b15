"""Where to cut a chain of operators whose stages replay what their memory does not hold.

A stage takes the seconds of its operators and of what its memory forces it to replay, so that cuts and
recompute are chosen together (as in AdaPipe, ASPLOS 2024). What a range of operators replays for how many
bytes is read off *prices*. At a price of a byte saved, the whole chain has one best choice, and the sums of
that over a range are a choice for the range. So a few prices make a curve of every range, and a difference of
prefix sums is a point of it. The cut is optimal over these points, by dynamic programming.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipec.errors import InfeasibleError
from pipec.ir.text import format_bytes

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Chain:
    """Operators in order. The last three have a row for each price, and figures of one microbatch.

    ``entry_seconds[k]`` is how long what crosses the chain before operator k is on its way, and
    ``entry_bytes[k]`` its size.
    """

    seconds: Vector
    resident_bytes: Vector
    entry_seconds: Vector
    entry_bytes: Vector
    replay_seconds: Vector
    saved_bytes: Vector
    replayed_bytes: Vector


def cut_chain(
    chain: Chain, in_flight: Sequence[int], limits: Sequence[float], tolerance: float = 0.0
) -> list[int]:
    """The first operator of each stage: the slowest stage is as fast as possible.

    Stage k has ``in_flight[k]`` microbatches at once within ``limits[k]`` bytes. Of cuts that are within the
    share ``tolerance`` of the best, one that communicates least is taken.

    Raises:
        InfeasibleError: no cut fits into memory.
    """
    stages = [_Stages(chain, flying, limit) for flying, limit in zip(in_flight, limits, strict=True)]
    slowest = _slowest_of_best(chain, stages)
    if slowest == math.inf:
        raise InfeasibleError(
            f"no cut into {len(stages)} stages fits into {format_bytes(min(limits))}, even if stages replay"
        )
    return _least_communication(chain, stages, slowest * (1 + tolerance))


class _Stages:
    """The stages that one rank could have."""

    def __init__(self, chain: Chain, in_flight: int, limit: float) -> None:
        bytes_held = in_flight * chain.saved_bytes + chain.replayed_bytes + chain.resident_bytes
        self._busy, self._replay, self._held = map(_sums, (chain.seconds, chain.replay_seconds, bytes_held))
        self._entry_seconds, self._limit = chain.entry_seconds, limit
        self._entry_bytes = in_flight * chain.entry_bytes

    def seconds(self, first: int) -> Vector:
        """Of stages from operator ``first`` to each later one, ends included; infinite if they do not fit."""
        busy = self._busy[first + 1 :] - self._busy[first]
        replay = self._replay[:, first + 1 :] - self._replay[:, first, None]
        held = self._held[:, first + 1 :] - self._held[:, first, None] + self._entry_bytes[first]
        least = np.where(held <= self._limit, replay, np.inf).min(axis=0)
        seconds: Vector = np.maximum(busy + least, self._entry_seconds[first])
        return seconds


def _slowest_of_best(chain: Chain, stages: Sequence[_Stages]) -> float:
    """The seconds of the slowest stage of the best cut, infinite if none fits."""
    best = np.full(len(chain.seconds) + 1, np.inf)
    best[0] = 0.0
    for stage in stages:
        following = np.full_like(best, np.inf)
        for first in np.flatnonzero(best[:-1] < np.inf).tolist():
            reached = np.maximum(stage.seconds(first), best[first])
            np.minimum(following[first + 1 :], reached, out=following[first + 1 :])
        best = following
    return float(best[-1])


def _least_communication(chain: Chain, stages: Sequence[_Stages], limit: float) -> list[int]:
    """The cut of which no stage is slower than ``limit`` and whose messages take least."""
    count = len(chain.seconds) + 1
    best, begins = np.full(count, np.inf), []
    best[0] = 0.0
    for stage in stages:
        following, begin = np.full(count, np.inf), np.zeros(count, int)
        for first in np.flatnonzero(best[:-1] < np.inf).tolist():
            sent = best[first] + chain.entry_seconds[first]
            better = (
                np.flatnonzero((stage.seconds(first) <= limit) & (sent < following[first + 1 :])) + first + 1
            )
            following[better], begin[better] = sent, first
        best = following
        begins.append(begin)
    firsts, end = list[int](), count - 1
    for begin in reversed(begins):
        end = int(begin[end])
        firsts.insert(0, end)
    return firsts


def _sums(figures: Vector) -> Vector:
    """Sums of all before each position, along the last axis."""
    return np.concatenate([np.zeros((*figures.shape[:-1], 1)), np.cumsum(figures, axis=-1)], axis=-1)
