"""The bound by containment of downsets, for more downsets than can be compared in pairs.

A downset that is the only one of its size is contained in all larger ones. Such downsets divide the others
into blocks, and containment is examined only inside a block::

    {}  {a}  | {a b}  {a c} |  {a b c}        a -> b, a -> c

Inside a block, whatever a downset can reach, some downset can reach that contains it and one operator more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise

import numpy as np
from numpy.typing import NDArray

from pipec.planner.bounds import DeviceCounts
from pipec.planner.downsets import Downsets, Indices, Mask, Vector


@dataclass(frozen=True)
class ContainmentBound:
    """Charges a stage from downset d to downset e, which contains d, on m replicas, in seconds,

        max(busy[m - 1, e] - busy[m - 1, d], link[d]) / m

    On equal devices, without latency or a limit of memory, these are the exact seconds of the stage.
    """

    downsets: Downsets
    busy: Vector
    link: Vector

    def finish(self, num_devices: int, limit: float) -> DeviceCounts:
        """The fewest devices for the operators after each downset; ``num_devices + 1`` if too few."""
        fewest = np.full(len(self.link), num_devices + 1, dtype=np.intp)
        fewest[-1] = 0
        for devices in range(1, num_devices + 1):
            for replicas in range(1, min(devices, len(self.busy)) + 1):
                waiting = (fewest > num_devices) & (self.link <= replicas * limit)
                able = self._reach(fewest == devices - replicas, waiting, replicas, limit)
                fewest[waiting & able] = devices
        return fewest

    def plan(self, finish: DeviceCounts, limit: float) -> list[int]:
        """The downsets of a plan within the limit, on the fewest devices."""
        chosen = [0]
        while finish[chosen[-1]] > 0:
            chosen.append(self._next_downset(finish, chosen[-1], limit))
        return chosen

    def _reach(self, ends: Mask, waiting: Mask, replicas: int, limit: float) -> Mask:
        """Whether a stage from each waiting downset may end at one of ``ends`` in time."""
        busy = self.busy[replicas - 1]
        latest, end = busy + replicas * limit, np.where(ends, busy, np.inf)
        able: Mask = np.minimum.accumulate(end[::-1])[::-1][self._contained_from] <= latest
        for block in self._blocks:
            inside = slice(block.first, block.last + 1)
            doubtful = waiting[inside] & ~able[inside]
            if (end[inside].min() <= latest[inside][doubtful]).any():
                able[inside] |= block.least_above(end[inside]) <= latest[inside]
        return able

    def _next_downset(self, finish: DeviceCounts, downset: int, limit: float) -> int:
        """The last downset where a stage on the fewest replicas may end."""
        members = self.downsets.membership()
        for replicas in range(1, min(int(finish[downset]), len(self.busy)) + 1):
            busy = self.busy[replicas - 1]
            in_time = busy <= busy[downset] + replicas * limit
            ends = np.flatnonzero(in_time & (finish == finish[downset] - replicas))
            ends = ends[members[:, ends][members[:, downset]].all(axis=0)]
            if len(ends) and self.link[downset] <= replicas * limit:
                return int(ends[-1])
        raise AssertionError("finish counts a stage from each downset")

    @cached_property
    def _unique_sizes(self) -> Indices:
        """The downsets that are the only ones of their size."""
        _, first, number = np.unique(self.downsets.sizes, return_index=True, return_counts=True)
        unique: Indices = first[number == 1]
        return unique

    @cached_property
    def _contained_from(self) -> Indices:
        """For each downset, the first one of unique size that contains it, as all later ones do."""
        unique = self._unique_sizes
        contained: Indices = unique[np.searchsorted(unique, np.arange(len(self.link)))]
        return contained

    @cached_property
    def _blocks(self) -> list["_Block"]:
        of = self.downsets
        members = of.membership()
        blocks = []
        for first, last in pairwise(self._unique_sizes.tolist()):
            if last - first > 1:
                inside = np.flatnonzero(members[:, first] != members[:, last])
                place = {op: k for k, op in enumerate(inside.tolist())}
                before = [(place[u], place[v]) for u, v in of.before if u in place and v in place]
                blocks.append(_Block(first, last, members[inside, first : last + 1], before))
        return blocks


@dataclass(frozen=True)
class _Block:
    """All downsets between ``first`` and ``last``, by size.

    ``members[k, d]`` tells whether a downset has the k-th of the operators in which these two differ.
    ``before`` holds pairs of these operators: a downset with the second of a pair has the first.
    """

    first: int
    last: int
    members: Mask
    before: Sequence[tuple[int, int]]

    def least_above(self, values: Vector) -> Vector:
        """For each downset, the least of its own value and the values of the downsets that contain it."""
        least = values.copy()
        for level, larger, begins in self._levels:
            np.minimum(least[level], np.minimum.reduceat(least[larger], begins), out=least[level])
        return least

    @cached_property
    def _levels(self) -> list[tuple[slice, Indices, Indices]]:
        """For each size, the largest first: its downsets; those that contain one of them and an operator
        more, downset by downset; and where those of each downset begin.
        """
        smaller, larger = self._steps()
        begins = np.searchsorted(smaller, np.arange(self.last - self.first + 1))
        by_size = np.flatnonzero(np.diff(self.members.sum(axis=0), prepend=-1)).tolist()
        return [
            (
                slice(level, behind),
                larger[begins[level] : begins[behind]],
                begins[level:behind] - begins[level],
            )
            for level, behind in reversed(list(pairwise(by_size)))
        ]

    def _steps(self) -> tuple[Indices, Indices]:
        """Pairs of downsets, the second of which has one operator more, ordered by the first.

        A downset is found by the sum of its operators' random numbers.
        """
        numbers, sums = self._sums()
        by_sum = np.argsort(sums)
        in_order, smaller, larger = sums[by_sum], [], []
        for op, number in enumerate(numbers):
            needs = [u for u, v in self.before if v == op]
            able = np.flatnonzero(self.members[needs].all(axis=0) & ~self.members[op])
            smaller.append(able)
            larger.append(by_sum[np.searchsorted(in_order, sums[able] + number)])
        by_smaller = np.argsort(np.concatenate(smaller), kind="stable")
        return np.concatenate(smaller)[by_smaller], np.concatenate(larger)[by_smaller]

    def _sums(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Random numbers of the operators and their sums in the downsets, which all differ."""
        for seed in count():
            numbers = np.random.default_rng(seed).integers(2**63, size=len(self.members), dtype=np.uint64)
            sums = numbers @ self.members
            if len(np.unique(sums)) == len(sums):
                break
        return numbers, sums
