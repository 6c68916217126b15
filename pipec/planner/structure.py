"""Which devices each stage is on: dynamic programming over positions of a chain and devices that are left.

This is PipeDream's recurrence (Narayanan et al., SOSP 2019, section 3.1) from the first stage to the last,
with classes of unequal devices. Say D are the devices that have no stage yet. Then the slowest stage of the
best plan for the blocks before position e takes

    best(e, D) = least of max(best(d, D + taken), seconds of a stage from d to e on the devices taken)

over all positions d and all devices that the last stage may take. Sums in place of maxima find the placements
that communicate least among those that are fast.
"""

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pipec.planner.cost_model import Positions, StageCosts, Vector
from pipec.planner.placements import Left, Option, Placement, Placements, devices_left

_MOST_MATRICES = 512
"""The most matrices of costs that are kept."""

_ROUNDING = 1e-12
"""The relative difference that sums of the same figures in another order may have."""


def best_placements(
    costs: StageCosts, placements: Placements, tolerance: float, known: float = np.inf
) -> tuple[float, list[Option]]:
    """The placements that communicate least among those that are fast within the tolerance.

    Returns them with the seconds of the slowest stage of the fastest plan. There are none if nothing fits, or
    if all plans take longer than the ``known`` seconds.
    """
    fastest, options = _Search(costs, placements, known, np.maximum).run()
    if tolerance and options:
        options = _Search(costs, placements, fastest * (1 + tolerance), np.add).run()[1]
    return fastest, options


@dataclass
class _Search:
    """The search for the least maximum of seconds, or sum of communication, with stages within a limit."""

    costs: StageCosts
    placements: Placements
    limit: float
    join: np.ufunc
    best: dict[Left, Vector] = field(default_factory=dict)
    arrivals: dict[Left, Positions] = field(default_factory=dict)
    log: list[tuple[Left, Option]] = field(default_factory=list)

    def run(self) -> tuple[float, list[Option]]:
        start, end = self.placements.start(), len(self.costs.seconds) - 1
        waiting: defaultdict[int, list[Left]] = defaultdict(list)
        waiting[devices_left(start)].append(start)
        self.best[start] = np.where(np.arange(end + 1) == 0, 0.0, np.inf)
        for remaining in range(devices_left(start), 0, -1):
            for left in waiting.pop(remaining, ()):
                for follows in self._place_next(left, remaining):
                    waiting[devices_left(follows)].append(follows)
        if () not in self.best or self.best[()][end] == np.inf:
            return np.inf, []
        return float(self.best[()][end]), self._options(end)

    def _place_next(self, left: Left, remaining: int) -> list[Left]:
        """Place the next stage in every way. Returns what is then left, where that is new."""
        work, new = self.costs.seconds, list[Left]()
        rounding = _ROUNDING * work[-1]
        most = remaining * self.limit * max(device.speed for device in self.placements.topology.devices)
        reached = np.flatnonzero((self.best[left] < np.inf) & (work[-1] - work <= most + rounding))
        if not len(reached):
            return []
        rows = np.arange(reached[0], reached[-1] + 1)
        for option in self.placements.options(left):
            follows = option.left
            if follows not in self.best:
                self.best[follows] = np.full(len(work), np.inf)
                self.arrivals[follows] = np.zeros(len(work), np.intp)
                new.append(follows)
            furthest = work[rows[-1]] + self.limit * option.placement.rate + rounding
            columns = np.arange(rows[0] + 1, work.searchsorted(furthest, side="right"))
            if not len(columns):
                continue
            stages = self._cost(option.placement, rows, columns)
            found = self.join(self.best[left][rows, None], stages).min(axis=0)
            better = found < self.best[follows][columns]
            if better.any():
                self.best[follows][columns[better]] = found[better]
                self.arrivals[follows][columns[better]] = len(self.log)
                self.log.append((left, option))
        return new

    def _options(self, position: int) -> list[Option]:
        options, left = list[Option](), Left()
        while position:
            left, option = self.log[self.arrivals[left][position]]
            options.append(option)
            stages = self._cost(option.placement, np.arange(position), np.array([position]))
            position = int(self.join(self.best[left][:position], stages[:, 0]).argmin())
        return options[::-1]

    def _cost(self, at: Placement, rows: Positions, columns: Positions) -> Vector:
        if at.device.memory_bytes < np.inf:
            return self._between(at, rows, columns)
        everywhere = self._everywhere(at._replace(later_devices=0))
        return everywhere[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]

    @functools.cached_property
    def _everywhere(self) -> Callable[[Placement], Vector]:
        everywhere = np.arange(len(self.costs.seconds))
        return functools.lru_cache(_MOST_MATRICES)(lambda at: self._between(at, everywhere, everywhere))

    def _between(self, at: Placement, rows: Positions, columns: Positions) -> Vector:
        span = rows[:, None], columns[None, :]
        seconds = self.costs.stage_seconds(at, *span)
        spent = seconds if self.join is np.maximum else self.costs.communication_seconds(at, *span)
        return np.where(seconds <= self.limit, spent, np.inf)
