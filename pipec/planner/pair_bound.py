"""The bound that charges each stage its cost on the fastest devices.

On equal devices without levels, latency or a limit of memory it is exact. Otherwise it charges for the
fastest device and the best link.
"""

from dataclasses import dataclass

import numpy as np

from pipec.planner.bounds import ROUNDING, DevicesNeeded
from pipec.planner.downsets import Indices, Vector
from pipec.planner.stage_cost_matrices import Matrix

_ROWS = 64
"""The number of rows in a block that stays in the cache."""


@dataclass(frozen=True, slots=True)
class PairBound:
    """Charges a stage from downset d to downset e on m replicas, in seconds,

        max(busy[d, e] + all_reduce[m - 1] * parameters[d, e], link[d]) / m

    Where there is no stage between two downsets, ``busy`` is infinite and ``parameters`` has no meaning.
    """

    busy: Matrix
    parameters: Matrix
    link: Matrix
    all_reduce: Vector

    @property
    def total_seconds(self) -> float:
        return float(self.busy[0, -1])

    @property
    def feasible_limit(self) -> float:
        replicas = np.arange(1, len(self.all_reduce) + 1)
        seconds = self.busy[0, -1] + self.all_reduce * self.parameters[0, -1]
        return float((seconds / replicas).min())

    def select(self, downsets: Indices) -> "PairBound":
        both = np.ix_(downsets, downsets)
        return PairBound(self.busy[both], self.parameters[both], self.link[downsets], self.all_reduce)

    def devices_needed(self, num_devices: int, limit: float) -> DevicesNeeded | None:
        blocks = [slice(row, row + _ROWS) for row in range(0, len(self.busy), _ROWS)]
        above = limit * (1 + ROUNDING)
        fewest = np.concatenate([self._fewest_replicas(rows, above, num_devices) for rows in blocks])
        finish, reach = np.zeros((2, len(fewest)), dtype=np.intp)
        for first in range(len(fewest) - 2, -1, -1):
            finish[first] = (fewest[first, first + 1 :] + finish[first + 1 :]).min()
        if finish[0] > num_devices:
            return None
        columns = np.ascontiguousarray(fewest.T)
        for last in range(1, len(fewest)):
            reach[last] = (columns[last, :last] + reach[:last]).min()
        return DevicesNeeded(finish, reach)

    def _fewest_replicas(self, rows: slice, limit: float, num_devices: int) -> Indices:
        """For each stage from ``rows``, the fewest replicas to keep within the limit; too many if none do.

        The replicas that compute needs make the all-reduce slower, which may need more replicas: iterating
        from below ends at the fewest.
        """
        most = len(self.all_reduce)
        seconds = np.maximum(self.busy[rows], self.link[rows]).ravel()
        fewest = np.ones(len(seconds))
        slow = np.flatnonzero(seconds > limit)
        with np.errstate(divide="ignore"):  # nothing keeps within a limit of 0
            fewest[slow] = np.ceil(seconds[slow] / limit)
        short = slow[fewest[slow] <= most]
        busy, parameters = self.busy[rows].ravel()[short], self.parameters[rows].ravel()[short]
        replicas = fewest[short]
        while len(short):
            needed = np.ceil((busy + self.all_reduce[replicas.astype(np.intp) - 1] * parameters) / limit)
            grown = needed > replicas
            fewest[short[grown]] = needed[grown]
            grown &= needed <= most
            short, busy, parameters, replicas = short[grown], busy[grown], parameters[grown], needed[grown]
        fewest[fewest > most] = num_devices + 1
        return fewest.astype(np.intp).reshape(-1, len(self.busy))
