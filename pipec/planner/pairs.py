"""The bound that charges stages between any two boundaries what they cost on the fastest devices.

On equal devices without levels, latency or a limit of memory it is exact; otherwise it takes the fastest
device and the best link for granted.
"""

from dataclasses import dataclass

import numpy as np

from pipec.planner.boundaries import Vector
from pipec.planner.bounds import Around
from pipec.planner.ranges import Indices, Matrix


@dataclass(frozen=True, slots=True)
class Pairs:
    """A stage on m replicas takes max(busy + all_reduce[m - 1] * parameter bytes, link) / m seconds.

    ``busy`` is infinite, and ``parameters`` means nothing, where no stage lies between two boundaries;
    ``link`` is a column.
    """

    busy: Matrix
    parameters: Matrix
    link: Matrix
    all_reduce: Vector

    @property
    def total_seconds(self) -> float:
        return float(self.busy[0, -1])

    @property
    def ceiling(self) -> float:
        replicas = np.arange(1, len(self.all_reduce) + 1)
        seconds = self.busy[0, -1] + self.all_reduce * self.parameters[0, -1]
        return float((seconds / replicas).min())

    def take(self, kept: Indices) -> "Pairs":
        both = np.ix_(kept, kept)
        return Pairs(self.busy[both], self.parameters[both], self.link[kept], self.all_reduce)

    def around(self, num_devices: int, limit: float) -> Around | None:
        fewest = self._fewest_replicas(limit, num_devices)
        finish, reach = np.zeros((2, len(fewest)), dtype=np.intp)
        for first in range(len(fewest) - 2, -1, -1):
            finish[first] = (fewest[first, first + 1 :] + finish[first + 1 :]).min()
        if finish[0] > num_devices:
            return None
        columns = np.ascontiguousarray(fewest.T)
        for last in range(1, len(fewest)):
            reach[last] = (columns[last, :last] + reach[:last]).min()
        return Around(finish, reach)

    def _fewest_replicas(self, limit: float, num_devices: int) -> Indices:
        """For each stage, the fewest replicas that keep it within the limit; too many if none do.

        From two on, more replicas are never slower, so that bisection finds the fewest.
        """
        most = len(self.all_reduce)
        fewest = np.where(np.maximum(self.busy, self.link) <= limit, 1, num_devices + 1)
        seconds = np.maximum(self.busy + self.all_reduce[-1] * self.parameters, self.link)
        rows, columns = np.nonzero((fewest > 1) & (seconds <= most * limit))
        busy, parameters = self.busy[rows, columns], self.parameters[rows, columns]
        link = np.broadcast_to(self.link, self.busy.shape)[rows, columns]
        low, high = np.ones(len(rows), dtype=np.intp), np.full(len(rows), most)
        while np.any(high - low > 1):
            middle = (low + high) // 2
            within = np.maximum(busy + self.all_reduce[middle - 1] * parameters, link) <= middle * limit
            high, low = np.where(within, middle, high), np.where(within, low, middle)
        fewest[rows, columns] = high
        return fewest
