"""Lower bounds of the slowest stage, and the downsets that a plan within such a bound can use.

A bound charges a stage no more than it costs. For a limit on seconds, the fewest devices that finish from a
downset follow from those that finish from later ones, and bisection finds the least limit for which the
devices suffice. ``DownsetBound`` looks at one downset at a time, ``pipec.planner.pair_bound`` at any two, and
``pipec.planner.chain_bound`` at those of a chain of operators.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from pipec.planner.downsets import Vector

DeviceCounts = NDArray[np.intp]

_FIRST_STEP = 0.02
"""The first limit exceeds the perfectly divided work by this share, as the optimum is rarely far above it.

The step doubles with every limit within which there is no plan.
"""

ROUNDING = 1e-12
"""The relative difference that sums of the same figures in another order may have."""


class Bound(Protocol):
    """Over some downsets, the empty one first and the whole last."""

    @property
    def total_seconds(self) -> float:
        """Seconds of all operators on one device."""
        ...

    @property
    def feasible_limit(self) -> float:
        """A limit in seconds within which there is a plan, if any plan is possible."""
        ...

    def select(self, downsets: NDArray[np.intp]) -> Self:
        """The bound over these downsets alone."""
        ...

    def devices_needed(self, num_devices: int, limit: float) -> "DevicesNeeded | None":
        """The fewest devices for a plan within the limit; None if there is no such plan."""
        ...


class DevicesNeeded(NamedTuple):
    """``finish``: the fewest devices for the operators after each downset; ``reach``: for those in it.

    A count is one more than the number of devices if these are too few.
    """

    finish: DeviceCounts
    reach: DeviceCounts

    def usable_downsets(self, num_devices: int) -> NDArray[np.intp]:
        """The downsets that a plan within the limit may use."""
        return np.flatnonzero(self.finish + self.reach <= num_devices)


def lower_bound_seconds(bound: Bound, num_devices: int, closeness: float, guess: float) -> float:
    """A limit within which the bound allows a plan; smaller by a factor of 1 + ``closeness``, it allows none.

    The limit is infinite if no plan is possible. ``guess`` is tried first: one little above the result saves
    work.
    """
    low, high, is_met = bound.total_seconds / num_devices, bound.feasible_limit, False
    step = low * _FIRST_STEP
    limit = guess if guess < high else low + step
    while high - low > closeness * high:
        if not low < limit < high and not low < (limit := low + (high - low) / 2) < high:
            break
        needed = bound.devices_needed(num_devices, limit)
        if needed is None:
            low, step = limit, 2 * step
        else:
            high, is_met = limit, True
            bound = bound.select(needed.usable_downsets(num_devices))
        limit = low + min(step, (high - low) / 2)
    return high if is_met or bound.devices_needed(num_devices, high) else math.inf


@dataclass(frozen=True, slots=True)
class DownsetBound:
    """Charges a stage from downset d to downset e on m replicas, in seconds,

        max(until[m - 1, e] - before[m - 1, d], link[d]) / m

    Downset e need not contain d. ``before`` and ``until`` are equal if downsets are listed. If only windows
    of their work are known, ``before`` is the most, and ``until`` the least, work of a downset.
    """

    before: Vector
    until: Vector
    link: Vector

    @property
    def total_seconds(self) -> float:
        return float(self.until[0, -1] - self.before[0, 0])

    @property
    def feasible_limit(self) -> float:
        replicas = np.arange(1, len(self.until) + 1)
        return float(((self.until[:, -1] - self.before[:, 0]) / replicas).min())

    def select(self, downsets: NDArray[np.intp]) -> "DownsetBound":
        return DownsetBound(self.before[:, downsets], self.until[:, downsets], self.link[downsets])

    def devices_needed(self, num_devices: int, limit: float) -> DevicesNeeded | None:
        """As ``Bound.devices_needed``; ``reach`` is computed without links."""
        finish = self._to_finish(num_devices, limit)
        if finish[0] > num_devices:
            return None
        backwards = DownsetBound(-self.until[:, ::-1], -self.before[:, ::-1], np.zeros_like(self.link))
        return DevicesNeeded(finish, backwards._to_finish(num_devices, limit * (1 + ROUNDING))[::-1])

    def _to_finish(self, num_devices: int, limit: float) -> DeviceCounts:
        """The fewest devices for the operators after each downset; ``num_devices + 1`` if too few.

        ``nearest[m - 1, k]`` is the nearest end of a stage on m replicas from which k devices finish.
        """
        fewest = np.full(len(self.link), num_devices + 1, dtype=np.intp)
        fewest[-1] = 0
        nearest = np.full((len(self.until), num_devices + 1), math.inf)
        for count in range(1, num_devices + 1):
            joined = self.until[:, fewest == count - 1].min(axis=1, initial=math.inf)
            nearest[:, count - 1 :] = np.minimum(nearest[:, count - 1 :], joined[:, None])
            waiting = np.flatnonzero(fewest > num_devices)
            for replicas in range(1, min(count, len(self.until)) + 1):
                latest = self.before[replicas - 1, waiting] + replicas * limit
                in_time = (latest >= nearest[replicas - 1, count - replicas]) & (
                    self.link[waiting] <= replicas * limit
                )
                fewest[waiting[in_time]] = count
        return fewest
