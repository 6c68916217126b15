"""The best cuts of a chain into stages whose placements are known.

A stage gets no faster and no smaller by ending later. So the positions from which the last k stages can
finish within a limit of seconds follow from those of the last k - 1 in one pass, with the nearest end::

    blocks of 3, 1, 2 and 2 seconds, on three equal devices within 4 seconds
    the last stage may begin at position     2, 3
    the one before it                        0, 1, 2
    the first one                            0

Bisection narrows the limit, and dynamic programming over the few positions that remain is exact.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pipec.planner.cost_model import Positions, StageCosts, Vector
from pipec.planner.placements import Placement

_CLOSE = 1e-3
"""How close bisection comes to a limit."""

_FIRST_STEP = 0.02
"""The share by which the first limit exceeds evenly divided work. The step doubles while nothing fits."""

_ROUNDING = 1e-12
"""The relative difference that sums of the same figures in another order may have."""


def best_cuts(
    costs: StageCosts, placements: Sequence[Placement], tolerance: float, fastest: float = math.inf
) -> list[int] | None:
    """The positions of the cuts, both ends of the chain included; None if nothing fits in memory.

    Of cuts that are fast within the tolerance, those that communicate least are taken; of these the fastest,
    nearly, and of these the earliest. ``fastest``: the least seconds on any placements, where that is known.
    """
    bound = _least_limit(costs, placements)
    if bound is None:
        return None
    usable = _usable(costs, placements, bound)
    low = float(_finish(costs.stage_seconds, placements, usable, np.maximum)[0][0]) * (1 + _ROUNDING)
    limit, high = low, max(low, min(low, fastest) * (1 + tolerance))
    best = _within(costs, placements, high)
    while low < high:
        found = _within(costs, placements, limit)
        if found.spent <= best.spent * (1 + _ROUNDING):
            best, high = found, limit
        else:
            low = limit
        if high - low <= _CLOSE * high:
            break
        limit = (low + high) / 2
    return best.positions


class _Found(NamedTuple):
    positions: list[int]
    spent: float


def _within(costs: StageCosts, placements: Sequence[Placement], limit: float) -> _Found:
    """The cuts that communicate least with all stages within ``limit`` seconds."""

    def spent(at: Placement, first: Positions, last: Positions) -> Vector:
        in_time = costs.stage_seconds(at, first, last) <= limit
        return np.where(in_time, costs.communication_seconds(at, first, last), np.inf)

    usable = _usable(costs, placements, limit)
    finish = _finish(spent, placements, usable, np.add)
    positions = [0]
    for stage, at in enumerate(placements):
        each = spent(at, np.array(positions[-1]), usable[stage + 1]) + finish[stage + 1]
        positions.append(int(usable[stage + 1][each.argmin()]))
    return _Found(positions, float(finish[0][0]))


def _finish(
    cost: Callable[[Placement, Positions, Positions], Vector],
    placements: Sequence[Placement],
    usable: Sequence[Positions],
    join: np.ufunc,
) -> list[Vector]:
    """The least joint cost from each usable position before each stage to the end."""
    finish = [np.zeros(1)]
    for at, first, last in reversed([*zip(placements, usable[:-1], usable[1:], strict=True)]):
        finish.append(join(cost(at, first[:, None], last[None, :]), finish[-1]).min(axis=1))
    return finish[::-1]


def _least_limit(costs: StageCosts, placements: Sequence[Placement]) -> float | None:
    """A limit within which there are cuts; smaller by a factor of 1 + ``_CLOSE``, there are none."""
    work, whole = float(costs.seconds[-1]), (np.array(0), np.array(-1))
    low = work / sum(at.rate for at in placements)
    high = max(work / at.rate + float(costs.communication_seconds(at, *whole)) for at in placements)
    high += float(costs.crossing.max())
    if _usable(costs, placements, low):
        return low
    if not _usable(costs, placements, high):
        return None
    step = low * _FIRST_STEP
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        limit = min(low + step, middle) if step else middle
        if not low < limit < high:
            break
        if _usable(costs, placements, limit):
            high = limit
        else:
            low, step = limit, 2 * step
    return high


def _usable(costs: StageCosts, placements: Sequence[Placement], limit: float) -> list[Positions]:
    """The positions between stages that cuts within the limit may use; an empty list if there are no cuts."""
    last = len(costs.seconds) - 1
    usable = [np.array([last])]
    for at in reversed(placements):
        ends = usable[-1]
        longest = limit * at.rate * (1 + _ROUNDING) + _ROUNDING * costs.seconds[-1]
        first = np.arange(costs.seconds.searchsorted(costs.seconds[ends[0]] - longest), ends[-1])
        nearest = ends[ends.searchsorted(first, side="right")]
        usable.append(first[costs.stage_seconds(at, first, nearest) <= limit])
        if not len(usable[-1]):
            return []
    usable.reverse()
    if usable[0][0] != 0:
        return []
    usable[0] = usable[0][:1]
    for stage, at in enumerate(placements):
        begins, last_ones = usable[stage], usable[stage + 1]
        begins = begins[costs.crossing[at.level, begins] <= limit * at.links]
        nearest = begins.searchsorted(last_ones) - 1
        able = nearest >= 0
        ends = last_ones[able]
        usable[stage + 1] = ends[costs.stage_seconds(at, begins[nearest[able]], ends) <= limit]
    return usable
