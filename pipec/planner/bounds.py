"""How fast the slowest stage can be at best, and which boundaries a plan that fast can use.

The bound charges a stage from boundary b to boundary e on m replicas no more than it costs,

    max(end[m, e] - begin[m, b], link[b]) / m

seconds. Of boundaries in one line it asks only that b comes before e; of others it asks nothing, so that
what is before b need not be before e. For a limit on these seconds, the fewest devices that finish from a
boundary follow from those that finish from the ones after it, and bisection finds the least limit for which
the devices suffice.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipec.planner.boundaries import Vector

Counts = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Potentials:
    """Row m - 1 of ``begin`` and ``end`` serves stages on m replicas. Columns and ``link``: boundaries."""

    begin: Vector
    end: Vector
    link: Vector
    is_line: bool

    def take(self, kept: NDArray[np.intp]) -> "Potentials":
        return Potentials(self.begin[:, kept], self.end[:, kept], self.link[kept], self.is_line)


def least_seconds(potentials: Potentials, num_devices: int, closeness: float) -> float:
    """A limit that the bound meets, by a factor of 1 + ``closeness`` at most above one it cannot meet."""
    replicas = np.arange(1, len(potentials.begin) + 1)
    high = float(((potentials.end[:, -1] - potentials.begin[:, 0]) / replicas).min())
    low = 0.0
    while high - low > closeness * high and low < (middle := low + (high - low) / 2) < high:
        if to_finish(potentials, num_devices, middle)[0] > num_devices:
            low = middle
            continue
        high = middle
        if not potentials.is_line:
            finish, reach = devices_around(potentials, num_devices, high)
            potentials = potentials.take(np.flatnonzero(finish + reach <= num_devices))
    return high


def devices_around(potentials: Potentials, num_devices: int, limit: float) -> tuple[Counts, Counts]:
    """The fewest devices for what is after each boundary, and for what is before it, as far as known."""
    mirrored = Potentials(
        -potentials.end[:, ::-1],
        -potentials.begin[:, ::-1],
        np.zeros_like(potentials.link),
        potentials.is_line,
    )
    reach = to_finish(mirrored, num_devices, limit)[::-1]
    return to_finish(potentials, num_devices, limit), reach


def to_finish(potentials: Potentials, num_devices: int, limit: float) -> Counts:
    """The fewest devices for what is after each boundary; ``num_devices + 1`` if these are too few."""
    fewest = np.full(len(potentials.link), num_devices + 1, dtype=np.intp)
    fewest[-1] = 0
    for count in range(1, num_devices + 1):
        replicas = np.arange(1, min(count, len(potentials.begin)) + 1)[:, None]
        open_ends = np.where(fewest <= count - replicas, potentials.end[: len(replicas)], math.inf)
        within = _lowest(open_ends, potentials.is_line) - potentials.begin[: len(replicas)]
        able = (within <= replicas * limit) & (potentials.link <= replicas * limit)
        fewest[able.any(axis=0) & (fewest > count)] = count
    return fewest


def _lowest(ends: Vector, is_line: bool) -> Vector:
    """For each boundary, the least of the ``ends`` that a stage from it may reach."""
    if not is_line:
        return ends.min(axis=1, keepdims=True)
    lowest = np.full(ends.shape, math.inf)
    lowest[:, :-1] = np.minimum.accumulate(ends[:, :0:-1], axis=1)[:, ::-1]
    return lowest
