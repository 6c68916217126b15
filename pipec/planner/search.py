"""From boundaries to stages: bounds first, to search only boundaries that a best plan may use.

Small searches go without. Otherwise the first limit is the least that the bound allows, and it is raised
until the best plan over the boundaries it leaves is within it: then no other plan is better.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipec.planner.boundaries import Boundaries, Vector
from pipec.planner.bounds import Counts, Potentials, devices_around, least_seconds
from pipec.planner.cost_model import CostModel
from pipec.planner.hierarchy import Chosen, Hierarchy, Useful
from pipec.planner.partition import Transfer
from pipec.planner.ranges import cuts_suffice, ranges
from pipec.planner.topology import Topology, group

_FEW_STEPS = 10**8
"""Of pairs of boundaries times pairs of devices: less than it takes to work out bounds."""

_MANY_STEPS = 10**8

_SLACKS = (1e-9, 1e-3, 1e-2, 1e-1, math.inf)
"""By how much the limit may exceed the bound, one attempt each."""

_ROUNDING = 1e-12
"""The bound and the search add the same figures in another order."""


@dataclass(frozen=True)
class Search:
    """``value_seconds[level, transfer]``; ``most_replicas`` a stage has at each level."""

    boundaries: Boundaries
    transfers: Sequence[Transfer]
    value_seconds: Vector
    topology: Topology
    model: CostModel
    most_replicas: int
    limits_memory: bool

    def run(self) -> tuple[Boundaries, tuple[Chosen, ...]]:
        """The best stages and the boundaries they refer to; no stages if none fit in memory."""
        num_devices = len(self.topology.devices)
        if (len(self.boundaries) * num_devices) ** 2 <= _FEW_STEPS:
            everything = np.arange(len(self.boundaries))
            return self.boundaries, self._stages(self.boundaries, lambda _: everything)
        potentials = self._potentials()
        least = least_seconds(potentials, num_devices, closeness=0.0 if self._is_exact else _SLACKS[0])
        for slack in (_ROUNDING,) if self._is_exact else _SLACKS:
            limit = least * (1 + slack)
            finish, reach = devices_around(potentials, num_devices, limit)
            if self._is_exact:
                finish = _narrowed(potentials, finish, reach, limit)
                reach = reach + num_devices - finish[0]
            kept = np.flatnonzero(finish + reach <= num_devices)
            fewer = self.boundaries.take(kept)
            stages = self._stages(fewer, _useful(finish[kept], reach[kept], num_devices))
            if stages and max(stage.seconds for stage in stages) <= limit:
                break
        return fewer, stages

    def _stages(self, fewer: Boundaries, useful: Useful) -> tuple[Chosen, ...]:
        costs = ranges(fewer, self.transfers, self.value_seconds, self.topology.levels, self.model)
        hierarchy = Hierarchy(costs, self.most_replicas, self.limits_memory)
        return hierarchy.pipeline(group(self.topology), useful)

    @property
    def _is_flat(self) -> bool:
        return len(self.topology.levels) == len(set(self.topology.devices)) == 1

    @property
    def _is_exact(self) -> bool:
        """Whether the bound is the optimum: its seconds are those of the stages."""
        has_cuts = self.model.overlap or cuts_suffice(self.boundaries, self.transfers)
        has_latency = self.most_replicas > 1 and self.topology.levels[0].latency_seconds > 0
        simple = self._is_flat and not has_latency and not self.limits_memory
        return simple and has_cuts and self.boundaries.is_line

    def _potentials(self) -> Potentials:
        """On several levels or unequal devices: as if all were the fastest, joined by the best link."""
        num_devices = len(self.topology.devices)
        replicas = range(1, (min(self.most_replicas, num_devices) if self._is_flat else num_devices) + 1)
        seconds, parameters = self.boundaries.totals[:2]
        seconds = seconds / max(device.speed for device in self.topology.devices)
        busy = np.array([seconds + m * self._all_reduce_share(m) * parameters for m in replicas])
        cuts = self.boundaries.cuts.min(axis=0)
        if self.model.overlap:
            return Potentials(busy, busy, cuts, self.boundaries.is_line)
        both = cuts if self._is_exact else np.zeros_like(cuts)
        return Potentials(busy - both, busy + both, np.zeros_like(cuts), self.boundaries.is_line)

    def _all_reduce_share(self, replicas: int) -> float:
        level = self.topology.levels[0]
        return self.model.all_reduce_seconds_per_byte(replicas, level) if self._is_flat else 0.0


def _useful(finish: Counts, reach: Counts, num_devices: int) -> Useful:
    left = [
        np.flatnonzero((finish <= count) & (reach <= num_devices - count)) for count in range(num_devices + 1)
    ]
    return lambda count: left[count]


def _narrowed(potentials: Potentials, finish: Counts, reach: Counts, limit: float) -> Counts:
    """``finish``, but of the boundaries of one best plan alone if there are too many to compare the rest."""
    most = int(finish[0])
    sizes = [((finish <= count) & (reach <= most - count)).sum() for count in range(most + 1)]
    if sum(sizes) ** 2 <= _MANY_STEPS:
        return finish
    chain, left = [0], most
    while finish[chain[-1]] > 0:
        left, following = _next_boundary(potentials, finish, chain[-1], left, limit)
        chain.append(following)
    narrowed = np.full_like(finish, len(finish) + most)
    narrowed[chain] = finish[chain]
    return narrowed


def _next_boundary(
    potentials: Potentials, finish: Counts, boundary: int, left: int, limit: float
) -> tuple[int, int]:
    """The devices left after a stage from ``boundary`` on the fewest replicas, and the last place it may end."""
    for replicas in range(1, left + 1):
        begin, link = potentials.begin[replicas - 1, boundary], potentials.link[boundary]
        able = (finish <= left - replicas) & (potentials.end[replicas - 1] - begin <= replicas * limit)
        able[: boundary + 1] = False
        if link <= replicas * limit and able.any():
            return left - replicas, int(np.flatnonzero(able)[-1])
    raise AssertionError("to_finish promised a stage")
