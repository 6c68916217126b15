"""The bound for a chain of operators, which charges stages for memory too.

If n devices are the fewest that finish from a downset, a stage on m replicas begins there which ends where
n - m are the fewest. Such ends are few and next to each other: however many devices there are, each downset
is examined a few times. Say operators take 3, 1, 2 and 2 seconds, and the limit is 4::

    downset (operators held)      0    1    2    3    4
    fewest devices to finish      2    2    1    1    0
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipec.planner.bounds import ROUNDING, DeviceCounts, DevicesNeeded
from pipec.planner.downsets import Indices, Mask, Vector


@dataclass(frozen=True, slots=True)
class ChainBound:
    """Charges a stage from downset d to downset e on m replicas, in seconds,

        max(busy[m - 1, e] - busy[m - 1, d], link[d]) / m

    With k later devices for each replica, the stage holds ``resident + in_flight(k) * saved`` bytes.
    ``busy``, ``resident`` and ``saved`` are sums up to a downset.
    """

    busy: Vector
    link: Vector
    resident: Vector
    saved: Vector
    memory_bytes: float
    in_flight: Callable[[int], int]

    @property
    def total_seconds(self) -> float:
        return float(self.busy[0, -1] - self.busy[0, 0])

    @property
    def feasible_limit(self) -> float:
        return float((self.busy[:, -1] - self.busy[:, 0]).max() + self.link.max())

    def select(self, downsets: Indices) -> "ChainBound":
        return ChainBound(
            self.busy[:, downsets],
            self.link[downsets],
            self.resident[downsets],
            self.saved[downsets],
            self.memory_bytes,
            self.in_flight,
        )

    def devices_needed(self, num_devices: int, limit: float) -> DevicesNeeded | None:
        """As ``Bound.devices_needed``; ``reach`` ignores links, and assumes the fewest later devices."""
        finish = self._fewest(num_devices, limit, None)
        if finish[0] > num_devices:
            return None
        reach = self._backwards()._fewest(num_devices, limit * (1 + ROUNDING), finish[::-1])
        return DevicesNeeded(finish, reach[::-1])

    def _backwards(self) -> "ChainBound":
        return ChainBound(
            busy=-self.busy[:, ::-1],
            link=np.zeros_like(self.link),
            resident=-self.resident[::-1],
            saved=-self.saved[::-1],
            memory_bytes=self.memory_bytes,
            in_flight=self.in_flight,
        )

    def _fewest(self, num_devices: int, limit: float, later: DeviceCounts | None) -> DeviceCounts:
        """The fewest devices for the operators after each downset; ``num_devices + 1`` if too few.

        ``later[d]`` is the number of devices after a stage from d; None counts those found here.
        """
        fewest = np.full(len(self.link), num_devices + 1, dtype=np.intp)
        fewest[-1] = 0
        ends, waiting = [np.array([len(fewest) - 1])], np.arange(len(fewest) - 1)
        for count in range(1, num_devices + 1):
            for replicas in range(1, min(count, len(self.busy)) + 1):
                end = ends[count - replicas]
                begin = self._in_time(waiting, end, replicas, limit)
                if len(begin):
                    after = np.full(len(begin), count - replicas) if later is None else later[begin]
                    fewest[begin[self._may_end(begin, end, replicas, limit, after)]] = count
            found = fewest[waiting] == count
            ends.append(waiting[found])
            waiting = waiting[~found]
        return fewest

    def _in_time(self, waiting: Indices, ends: Indices, replicas: int, limit: float) -> Indices:
        """The waiting downsets before the last end from which the first end can be reached in time."""
        busy = self.busy[replicas - 1]
        if not len(ends) or not len(waiting):
            return ends[:0]
        earliest = busy[ends[0]] - replicas * limit - ROUNDING * (busy[-1] - busy[0])
        if busy[waiting[-1]] < earliest:
            return ends[:0]
        first, behind = waiting.searchsorted((busy.searchsorted(earliest), ends[-1]))
        return waiting[first:behind]

    def _may_end(
        self, begin: Indices, ends: Indices, replicas: int, limit: float, later: DeviceCounts
    ) -> Mask:
        """Whether a stage from each downset of ``begin`` may end at one of ``ends``, both in order.

        A stage does not get faster or smaller by ending later, so only its first end is examined.
        """
        busy = self.busy[replicas - 1]
        first = np.searchsorted(ends, begin, side="right")
        able: Mask = first < self._behind(begin, ends, -(-later // replicas))
        nearest = ends[np.minimum(first, len(ends) - 1)]
        able &= busy[nearest] <= busy[begin] + replicas * limit
        able &= self.link[begin] <= replicas * limit
        return able

    def _behind(self, begin: Indices, ends: Indices, after: DeviceCounts) -> Indices:
        """The number of ``ends`` within the memory of each stage, with ``after`` later devices."""
        behind = np.full(len(begin), len(ends))
        if self.memory_bytes < math.inf:
            for later in np.unique(after).tolist():
                some = np.flatnonzero(after == later)
                most = self._bytes_until(begin[some], later) + self.memory_bytes * (1 + ROUNDING)
                behind[some] = np.searchsorted(self._bytes_until(ends, later), most, side="right")
        return behind

    def _bytes_until(self, downsets: Indices, after: int) -> Vector:
        """The bytes of all operators up to each downset, with ``after`` later devices."""
        num_bytes: Vector = self.resident[downsets] + self.in_flight(after) * self.saved[downsets]
        return num_bytes

    def plan(self, finish: DeviceCounts, limit: float) -> list[int]:
        """The downsets of a plan within the limit, on the fewest devices."""
        chosen = [0]
        while finish[chosen[-1]] > 0:
            chosen.append(self._next_downset(finish, chosen[-1], limit))
        return chosen

    def _next_downset(self, finish: DeviceCounts, downset: int, limit: float) -> int:
        """The last downset where a stage on the fewest replicas may end."""
        begin = np.array([downset])
        for replicas in range(1, min(int(finish[downset]), len(self.busy)) + 1):
            later, busy = finish[begin] - replicas, self.busy[replicas - 1]
            behind = int(np.searchsorted(busy, busy[downset] + replicas * limit, side="right"))
            ends = np.flatnonzero(finish[downset + 1 : behind] == later) + downset + 1
            for end in ends[::-1]:
                if self._may_end(begin, np.array([end]), replicas, limit, later)[0]:
                    return int(end)
        raise AssertionError("finish counts a stage from each downset")
