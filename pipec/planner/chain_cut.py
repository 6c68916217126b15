"""Cuts of a chain of operators whose stages recompute the values that their memory cannot hold.

A stage takes the seconds of its operators and of the values that its memory forces it to recompute, so that
cuts and recompute are chosen together (as in AdaPipe, ASPLOS 2024). The trade of seconds for bytes in a range
of operators follows from *prices*: at a price for each saved byte, the whole chain has one best choice, whose
sums over a range are a choice for the range. So a few prices give a curve for every range, with differences
of prefix sums as its corners. Between corners the curve is a line, because a range may recompute some layers
as at one corner, and the others as at the next. The cut is optimal over these curves, by dynamic programming.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipec.errors import InfeasibleError
from pipec.ir.text_format import format_bytes

Vector = NDArray[np.float64]

_RECEIVED, _SENT = 3, 4
"""Messages that a stage holds besides those of microbatches in flight.

At its first boundary: the next message, and two gradients in transit. At its last: two gradients and two
messages."""

_ENDS = 4
"""The end of a backward is taken to be the first quarter of its stage's operators."""

_WIDER = 1.5
"""The limit on a stage's seconds grows by this factor until there is a cut."""

_ROUNDING = 1e-9
"""The relative difference that sums in another order may have."""


@dataclass(frozen=True)
class RecomputeCurve:
    """The recompute of operators for one microbatch: a row for each price, ascending.

    A stage recomputes everything before its backward, or one of ``segments`` at a time inside it.
    """

    seconds: Vector
    saved_bytes: Vector
    replayed_bytes: Vector
    segments: int = 1

    def held_bytes(self, chain: "OperatorChain", in_flight: int) -> tuple[Vector, Vector, Vector]:
        """Bytes that operators hold as a backward begins, as its last segment begins, and as it ends.

        It frees saved and recomputed values one by one, and until the end it holds the gradients of
        parameters that it has made. Segments are of about equal size.
        """
        share = 1 / self.segments
        others = (in_flight - 1) * self.saved_bytes + chain.resident_bytes
        one = share * (self.saved_bytes + self.replayed_bytes)
        return (
            others + self.saved_bytes + share * self.replayed_bytes,
            others + one + (1 - share) * chain.gradient_bytes,
            others + chain.gradient_bytes,
        )


@dataclass(frozen=True)
class OperatorChain:
    """Operators in order. ``curves`` are the ways to replay them, of which a stage takes one.

    ``entry_seconds[k]`` is how long what crosses the chain before operator k is on its way, and
    ``entry_bytes[k]`` its size. ``gradient_bytes`` are those that a backward makes of parameters, whose sums
    are among the ``resident_bytes``, and ``working_bytes`` what it holds of other values that it makes.
    """

    seconds: Vector
    resident_bytes: Vector
    gradient_bytes: Vector
    working_bytes: Vector
    entry_seconds: Vector
    entry_bytes: Vector
    curves: tuple[RecomputeCurve, ...]


def cut_chain(
    chain: OperatorChain, in_flight: Sequence[int], limits: Sequence[float], tolerance: float = 0.0
) -> list[int]:
    """The first operator of each stage: the slowest stage is as fast as possible.

    Stage k has ``in_flight[k]`` microbatches at once within ``limits[k]`` bytes. Of cuts that are within the
    share ``tolerance`` of the best, one that communicates least is taken.

    Raises:
        InfeasibleError: no cut fits into memory.
    """
    stages = [_Stages(chain, flying, limit) for flying, limit in zip(in_flight, limits, strict=True)]
    replays = max(float(curve.seconds.sum(axis=1).max(initial=0.0)) for curve in chain.curves)
    whole = float(chain.seconds.sum()) + replays + float(chain.entry_seconds.max(initial=0.0))
    most = whole / len(stages)
    slowest = _slowest_of_best(stages, most)
    while slowest == math.inf and most < whole:
        most = min(_WIDER * most, whole)
        slowest = _slowest_of_best(stages, most)
    if slowest == math.inf:
        raise InfeasibleError(
            f"no cut into {len(stages)} stages fits into {format_bytes(min(limits))}, even if stages replay; "
            "use more stages, or a higher limit"
        )
    return _least_communication(chain, stages, slowest * (1 + tolerance))


class _Stages:
    """The stages that one rank could have."""

    def __init__(self, chain: OperatorChain, in_flight: int, limit: float) -> None:
        self.busy, self._entry_seconds = _sums(chain.seconds), chain.entry_seconds
        self._received = (in_flight + _RECEIVED) * chain.entry_bytes
        self._sent = _SENT * np.append(chain.entry_bytes, 0.0)
        self._limit, self._working = limit, chain.working_bytes
        self._curves = [
            (_sums(each.seconds), *map(_sums, each.held_bytes(chain, in_flight))) for each in chain.curves
        ]

    def seconds(self, first: int, most: float) -> Vector:
        """Seconds of stages from operator ``first`` to each later one, ends included, within ``most``.

        It is infinite for those that do not fit, and for those that take longer.
        """
        most *= 1 + _ROUNDING
        later = slice(first + 1, int(np.searchsorted(self.busy, self.busy[first] + most, side="right")))
        rooms = self._limit - self._received[first] - self._sent[later]
        working = np.maximum.accumulate(self._working[first : later.stop - 1])
        at_end, replays = working[np.arange(len(working)) // _ENDS], []
        for curve in self._curves:
            seconds, begins, last, ends = (sums[:, later] - sums[:, [first]] for sums in curve)
            num_bytes = np.maximum(begins + working, np.maximum(last, ends) + at_end)
            replays.append(_least(rooms, seconds, num_bytes))
        busy = self.busy[later] - self.busy[first]
        seconds = np.maximum(busy + np.min(replays, axis=0), self._entry_seconds[first])
        within: Vector = np.where(seconds <= most, seconds, np.inf)
        return within


def _least(rooms: Vector, seconds: Vector, num_bytes: Vector) -> Vector:
    """The least seconds on a curve whose corners are the rows, with at most ``rooms`` bytes."""
    fits = num_bytes <= rooms
    crosses = ~fits[:-1] & fits[1:]
    share = (num_bytes[:-1] - rooms) / np.where(crosses, num_bytes[:-1] - num_bytes[1:], 1.0)
    between = np.where(crosses, seconds[:-1] + share * (seconds[1:] - seconds[:-1]), np.inf)
    least: Vector = np.concatenate([np.where(fits, seconds, np.inf), between]).min(axis=0)
    return least


def _firsts(stages: Sequence[_Stages], reached: Vector, number: int, most: float) -> list[int]:
    """Where stage ``number`` can begin, so that it and the later ones can do the rest within ``most``."""
    busy = stages[number].busy
    rest = busy[-1] - busy <= (len(stages) - number) * most * (1 + _ROUNDING)
    firsts: list[int] = np.flatnonzero(((reached < np.inf) & rest)[:-1]).tolist()
    return firsts


def _slowest_of_best(stages: Sequence[_Stages], most: float) -> float:
    """The seconds of the slowest stage of the best cut, infinite if none fits within ``most``."""
    best = np.full(len(stages[0].busy), np.inf)
    best[0] = 0.0
    for number, stage in enumerate(stages):
        following = np.full_like(best, np.inf)
        for first in _firsts(stages, best, number, most):
            reached = np.maximum(stage.seconds(first, most), best[first])
            later = following[first + 1 : first + 1 + len(reached)]
            np.minimum(later, reached, out=later)
        best = following
    return float(best[-1])


def _least_communication(chain: OperatorChain, stages: Sequence[_Stages], limit: float) -> list[int]:
    """The cut of which no stage is slower than ``limit`` and whose messages take least."""
    count = len(chain.seconds) + 1
    best, begins = np.full(count, np.inf), []
    best[0] = 0.0
    for number, stage in enumerate(stages):
        following, begin = np.full(count, np.inf), np.zeros(count, int)
        for first in _firsts(stages, best, number, limit):
            sent, fits = best[first] + chain.entry_seconds[first], stage.seconds(first, limit) < np.inf
            later = slice(first + 1, first + 1 + len(fits))
            better = np.flatnonzero(fits & (sent < following[later])) + first + 1
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
