"""The bound for operators in one line, which charges for memory too, and for most values at both ends.

If n devices are the fewest that finish from a boundary, a stage on m replicas begins there which ends where
n - m are the fewest. Such ends are few and close to each other: however many devices there are, each boundary
is looked at a few times.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipec.planner.boundaries import Boundaries, Mask, Vector, line_cuts
from pipec.planner.bounds import ROUNDING, Around, Counts
from pipec.planner.ranges import Indices


@dataclass(frozen=True, slots=True)
class Charges:
    """Seconds of values that a stage pays for where it begins, ``first``, and where it ends, ``last``.

    Only a stage of ``apart`` operators or more does. If a value enters it whose ends, from one to the next,
    are no further apart, one of them is inside; if a value leaves it which spans no more, none of them is
    before it. So it pays once for such values. ``are_all``: there are no others.
    """

    first: Vector
    last: Vector
    apart: int
    are_all: bool


def charges(boundaries: Boundaries, value_seconds: Vector, most_apart: int) -> Charges:
    """On the best level of ``value_seconds[level, transfer]``."""
    spans = np.array([ends[-1] - ends[0] for ends in boundaries.ends], dtype=np.intp)
    gaps = np.array([_widest_gap(ends) for ends in boundaries.ends], dtype=np.intp)
    longest = int(spans.max(initial=1))
    apart = min(longest, most_apart)
    first, last = (
        line_cuts(boundaries.ends, value_seconds * (reach <= apart), len(boundaries)).min(axis=0)
        for reach in (gaps, spans)
    )
    return Charges(first, last, apart, longest <= apart)


def _widest_gap(ends: Sequence[int]) -> int:
    return max((after - before for before, after in pairwise(ends)), default=0)


@dataclass(frozen=True, slots=True)
class Line:
    """Stages between boundaries, with ``operators`` before each, on devices of ``memory_bytes``.

    A stage of ``apart`` operators or more from boundary b to boundary e, on m replicas, takes

        max(busy[m - 1, e] - busy[m - 1, b] + first[b] + last[e], link[b]) / m

    seconds, and a shorter one at least as much without ``first`` and ``last``. With d later devices for each
    replica it holds ``resident + in_flight(d) * saved`` bytes; both are sums up to a boundary.
    """

    operators: Indices
    busy: Vector
    first: Vector
    last: Vector
    link: Vector
    apart: int
    resident: Vector
    saved: Vector
    memory_bytes: float
    in_flight: Callable[[int], int]

    @property
    def total_seconds(self) -> float:
        return float(self.busy[0, -1] - self.busy[0, 0])

    @property
    def ceiling(self) -> float:
        slowest = float((self.busy[:, -1] - self.busy[:, 0]).max())
        return slowest + float(self.first.max() + self.last.max() + self.link.max())

    def take(self, kept: Indices) -> "Line":
        return Line(
            self.operators[kept],
            self.busy[:, kept],
            self.first[kept],
            self.last[kept],
            self.link[kept],
            self.apart,
            self.resident[kept],
            self.saved[kept],
            self.memory_bytes,
            self.in_flight,
        )

    def around(self, num_devices: int, limit: float) -> Around | None:
        """Backwards, links are left out, and no more devices are later than must be."""
        finish = self._fewest(num_devices, limit, None)
        if finish[0] > num_devices:
            return None
        reach = self._backwards()._fewest(num_devices, limit * (1 + ROUNDING), finish[::-1])
        return Around(finish, reach[::-1])

    def _backwards(self) -> "Line":
        return Line(
            operators=-self.operators[::-1],
            busy=-self.busy[:, ::-1],
            first=self.last[::-1],
            last=self.first[::-1],
            link=np.zeros_like(self.link),
            apart=self.apart,
            resident=-self.resident[::-1],
            saved=-self.saved[::-1],
            memory_bytes=self.memory_bytes,
            in_flight=self.in_flight,
        )

    def _fewest(self, num_devices: int, limit: float, later: Counts | None) -> Counts:
        """To the last boundary from each, with so many ``later`` devices than a stage; None: just those."""
        fewest = np.full(len(self.link), num_devices + 1, dtype=np.intp)
        fewest[-1] = 0
        ends, waiting = [np.array([len(fewest) - 1])], np.arange(len(fewest) - 1)
        for count in range(1, num_devices + 1):
            for replicas in range(1, min(count, len(self.busy)) + 1):
                end = ends[count - replicas]
                begin = self._within_reach(waiting, end, replicas, limit)
                if len(begin):
                    after = np.full(len(begin), count - replicas) if later is None else later[begin]
                    fewest[begin[self._may_end(begin, end, replicas, limit, after)]] = count
            found = fewest[waiting] == count
            ends.append(waiting[found])
            waiting = waiting[~found]
        return fewest

    def _within_reach(self, waiting: Indices, ends: Indices, replicas: int, limit: float) -> Indices:
        """Those before the last of the ends from which the operators alone do not take too long."""
        busy = self.busy[replicas - 1]
        if not len(ends) or not len(waiting):
            return ends[:0]
        earliest = busy[ends[0]] - replicas * limit - ROUNDING * (busy[-1] - busy[0])
        if busy[waiting[-1]] < earliest:
            return ends[:0]
        first, behind = waiting.searchsorted((busy.searchsorted(earliest), ends[-1]))
        return waiting[first:behind]

    def _may_end(self, begin: Indices, ends: Indices, replicas: int, limit: float, later: Counts) -> Mask:
        """Whether a stage from each boundary of ``begin`` may end at one of ``ends``, both in order."""
        busy = self.busy[replicas - 1]
        latest = busy[begin] + replicas * limit
        behind = self._behind(begin, ends, -(-later // replicas))
        far = np.searchsorted(self.operators[ends], self.operators[begin] + self.apart)
        able: Mask = _least(busy[ends] + self.last[ends], far, behind) <= latest - self.first[begin]
        near = np.searchsorted(ends, begin, side="right")
        short = np.flatnonzero(near < np.minimum(far, behind))
        able[short] |= busy[ends[near[short]]] <= latest[short]
        able &= self.link[begin] <= replicas * limit
        return able

    def _behind(self, begin: Indices, ends: Indices, after: Counts) -> Indices:
        """How many of ``ends`` each stage can reach within its memory, with so many devices ``after`` it."""
        behind = np.full(len(begin), len(ends))
        if self.memory_bytes < math.inf:
            for later in np.unique(after).tolist():
                some = np.flatnonzero(after == later)
                most = self._held(begin[some], later) + self.memory_bytes * (1 + ROUNDING)
                behind[some] = np.searchsorted(self._held(ends, later), most, side="right")
        return behind

    def _held(self, until: Indices, after: int) -> Vector:
        """Bytes of everything up to some boundaries."""
        held: Vector = self.resident[until] + self.in_flight(after) * self.saved[until]
        return held

    def chain(self, finish: Counts, limit: float) -> list[int]:
        """Boundaries of a plan within the limit, on the fewest devices."""
        chain = [0]
        while finish[chain[-1]] > 0:
            chain.append(self._next_boundary(finish, chain[-1], limit))
        return chain

    def _next_boundary(self, finish: Counts, boundary: int, limit: float) -> int:
        """The last one where a stage on the fewest replicas may end."""
        begin = np.array([boundary])
        for replicas in range(1, min(int(finish[boundary]), len(self.busy)) + 1):
            later, busy = finish[begin] - replicas, self.busy[replicas - 1]
            behind = int(np.searchsorted(busy, busy[boundary] + replicas * limit, side="right"))
            ends = np.flatnonzero(finish[boundary + 1 : behind] == later) + boundary + 1
            for end in ends[::-1]:
                if self._may_end(begin, np.array([end]), replicas, limit, later)[0]:
                    return int(end)
        raise AssertionError("finish promised a stage")


def _least(values: Vector, first: Indices, behind: Indices) -> Vector:
    """The least of ``values[first:behind]`` for each pair, infinite where there is none."""
    if (behind == len(values)).all():
        return np.append(np.minimum.accumulate(values[::-1])[::-1], math.inf)[first]
    windows = [values]
    while 2 ** len(windows) <= len(values):
        half = 2 ** (len(windows) - 1)
        windows.append(np.minimum(windows[-1][:-half], windows[-1][half:]))
    least, length = np.full(len(first), math.inf), behind - first
    for power, window in enumerate(windows):
        some = np.flatnonzero((length >= 2**power) & (length < 2 ** (power + 1)))
        least[some] = np.minimum(window[first[some]], window[behind[some] - 2**power])
    return least
