"""From boundaries to stages: bounds first, to search only boundaries that a best plan may use.

Small searches go without. Otherwise the first limit is the least that a bound allows, and it is raised until
the best plan over the boundaries it leaves is within it: then no other plan is better. If it leaves more than
can be searched, the best plan over the most promising ones is taken, and the bound tells how much better
another could be. A loose bound, for many boundaries, leaves some for a closer one, which leaves fewer for
dynamic programming. That of operators in one line is close enough by itself.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipec.hardware.topology import Topology
from pipec.planner.boundaries import Boundaries, Vector
from pipec.planner.bounds import ROUNDING, Bound, Counts, Loose, least_seconds
from pipec.planner.cost_model import CostModel
from pipec.planner.groups import group
from pipec.planner.hierarchy import Chosen, Hierarchy, Useful
from pipec.planner.line import Charges, Line, charges
from pipec.planner.nested import Nested
from pipec.planner.pairs import Pairs
from pipec.planner.ranges import Indices, Ranges, ranges

_FEW_OPTIONS = 64
"""Of devices times replicas for a stage: trying them all is faster than bounds."""

_FEW_STEPS = 10**6
"""Of pairs of boundaries times options: likewise."""

_MOST_PAIRED = 3000
"""So many boundaries are compared in pairs within seconds."""

_MOST_AT_FIRST = 3000
"""So many go without a bound that looks at one at a time."""

_MOST_NESTED = 300
"""So many, if pipelines inside groups are needed between all pairs."""

_PROMISING = 800
"""So many are searched where too many remain."""

_CLOSE = 1e-3
"""How close bisection comes, unless the bound is exact: dynamic programming finds the rest."""

_NO_FASTER = 1e-10
"""A plan that saves no more of the seconds is not looked for."""

_SLACKS = (1e-9, 1e-3, 1e-2, 1e-1, math.inf)
"""By how much the limit may exceed the bound, one attempt each."""


class Found(NamedTuple):
    """The best stages found, none if none fit in memory, and the seconds that no plan can be below."""

    stages: tuple[Chosen, ...]
    least_seconds: float

    @property
    def seconds(self) -> float:
        return max((stage.seconds for stage in self.stages), default=math.inf)


_Solve = Callable[[Indices, Counts, Counts, float], Found]
"""The best stages over some boundaries, given the devices to finish from and to reach each of them, and the
seconds of a plan."""


@dataclass(frozen=True)
class Search:
    """``value_seconds[level, transfer]``; ``most_replicas`` a stage has at each level."""

    boundaries: Boundaries
    value_seconds: Vector
    topology: Topology
    model: CostModel
    most_replicas: int
    limits_memory: bool
    every_device: bool

    def run(self) -> Found:
        everything = np.arange(len(self.boundaries))
        many = len(everything) > _MOST_AT_FIRST
        if self._num_options * len(everything) ** 2 <= _FEW_STEPS:
            return self._all_of(everything)
        if not (many or self._line_is_exact):
            return self._over_pairs(everything, math.inf)
        bound = self._line if self.boundaries.is_line else self._loose
        closeness = 0.0 if many and self._line_is_exact else _CLOSE
        solve = self._within_reach if self._line_is_exact else self._afresh
        found = self._raise_limit(everything, bound, closeness, _MOST_PAIRED, math.inf, solve)
        if self._nested_is_exact:
            return self._lower_limit(found)
        least = max(found.least_seconds, self._least_between_groups())
        return found._replace(least_seconds=min(least, found.seconds))

    def _least_between_groups(self) -> float:
        """What takes groups of the outermost level for devices, as fast as all of theirs together."""
        levels, devices, num_groups = (
            self.topology.levels,
            self.topology.devices,
            self.topology.levels[-1].size,
        )
        size, cuts = len(devices) // num_groups, self.boundaries.cuts[-1]
        speeds = (sum(device.speed for device in devices[k : k + size]) for k in range(0, len(devices), size))
        all_reduce = self._all_reduce_over(
            self._most_rate(len(levels) - 1), min(num_groups, self.most_replicas)
        )
        seconds, parameters = self.boundaries.totals[:2]
        busy = seconds / max(speeds) + np.outer(all_reduce, parameters)
        bound = Loose(busy, cuts if self.model.overlap else np.zeros_like(cuts))
        return least_seconds(bound, num_groups, _CLOSE, math.inf) / (1 + _CLOSE)

    def _over_pairs(self, chosen: Indices, known: float) -> Found:
        """Over the boundaries ``chosen``, few enough to compare all of them; a plan has ``known`` seconds."""
        most = _MOST_PAIRED if len(self.topology.levels) == 1 else _MOST_NESTED
        few = self._num_options <= _FEW_OPTIONS and len(chosen) <= most
        if few or self._num_options * len(chosen) ** 2 <= _FEW_STEPS:
            return self._all_of(chosen)
        return self._raise_limit(chosen, self._pairs(chosen), _CLOSE, most, known, self._within_reach)

    def _afresh(self, kept: Indices, _finish: Counts, _reach: Counts, known: float) -> Found:
        return self._over_pairs(kept, known)

    def _within_reach(self, kept: Indices, finish: Counts, reach: Counts, _known: float) -> Found:
        num_devices = len(self.topology.devices)
        useful = [
            np.flatnonzero((finish <= count) & (reach <= num_devices - count))
            for count in range(num_devices + 1)
        ]
        return self._exactly(kept, lambda count: useful[count])

    def _all_of(self, kept: Indices) -> Found:
        return self._exactly(kept, lambda _: np.arange(len(kept)))

    def _exactly(self, kept: Indices, useful: Useful) -> Found:
        minds_later = self.limits_memory and bool(self.boundaries.totals[3].any())
        ranges = self._ranges(kept)
        hierarchy = Hierarchy(ranges, self.most_replicas, minds_later, self.every_device)
        found = hierarchy.pipeline(group(self.topology), useful)
        stages = (stage._replace(first=int(kept[stage.first]), last=int(kept[stage.last])) for stage in found)
        return _found(tuple(stages))

    def _raise_limit(
        self, chosen: Indices, bound: Bound, closeness: float, most: int, known: float, solve: _Solve
    ) -> Found:
        """The best plan over the boundaries ``chosen``, of which ``solve`` can take ``most``."""
        num_devices = len(self.topology.devices)
        least = least_seconds(bound, num_devices, closeness, known)
        best, proven = _found(()), least / (1 + max(closeness, ROUNDING))
        for slack in _SLACKS if least < math.inf else ():
            limit = min(least * (1 + slack) if slack < math.inf else math.inf, best.seconds)
            around = bound.around(num_devices, limit)
            assert around is not None, "the bound promised a plan"
            finish, reach = around
            kept = around.useful(num_devices)
            complete = len(kept) <= most
            if not complete:
                kept = self._promising(chosen, kept, bound, finish, limit, most)
            found = solve(chosen[kept], finish[kept], reach[kept], best.seconds)
            best = min(found, best, key=lambda each: each.seconds)
            if complete:
                proven = max(proven, min(limit, found.least_seconds))
            if best.seconds <= limit or (best.stages and not complete):
                break
        return best._replace(least_seconds=min(proven, best.seconds))

    def _lower_limit(self, best: Found) -> Found:
        """The best plan of all, given a good one: limits just below it and half-way to what none can meet."""
        num_devices = len(self.topology.devices)
        nested = Nested(self.boundaries, self._busy, self.boundaries.cuts[0])
        low, just_below = best.least_seconds, True
        while low < (below := best.seconds * (1 - _NO_FASTER)):
            limit = below if just_below else (low + best.seconds) / 2
            finish = nested.finish(num_devices, limit)
            if finish[0] > num_devices:
                low, just_below = limit, False
            else:
                best = self._all_of(np.array(nested.chain(finish, limit)))
                just_below = not just_below
        return best._replace(least_seconds=min(low, best.seconds))

    def _promising(
        self, chosen: Indices, kept: Indices, bound: Bound, finish: Counts, limit: float, most: int
    ) -> Indices:
        """Some of too many boundaries: in a line those of a plan that meets the bound, then the cheapest."""
        chain = [0, len(chosen) - 1]
        if isinstance(bound, Line):
            chain = bound.chain(finish, limit)
            if self._line_is_exact:
                return np.array(chain)
        cheapest = np.argsort(self.boundaries.cuts[0, chosen[kept]], kind="stable")[: min(most, _PROMISING)]
        return np.union1d(chain, kept[cheapest])

    def _ranges(self, kept: Indices) -> Ranges:
        return ranges(self.boundaries.take(kept), self.value_seconds, self.topology.levels, self.model)

    @property
    def _line_is_exact(self) -> bool:
        """Whether its seconds are those of stages, unless these have only a few operators."""
        alike = len(self.topology.levels) == len(set(self.topology.devices)) == 1
        has_latency = self.most_replicas > 1 and self.topology.levels[0].latency_seconds > 0
        simple = self.boundaries.is_line and alike and not has_latency
        return simple and (self.model.overlap or self._charges.are_all)

    @property
    def _nested_is_exact(self) -> bool:
        alike = len(self.topology.levels) == len(set(self.topology.devices)) == 1
        has_latency = self.most_replicas > 1 and self.topology.levels[0].latency_seconds > 0
        return self.model.overlap and alike and not (has_latency or self.limits_memory or self.every_device)

    @functools.cached_property
    def _charges(self) -> Charges:
        share = len(self.boundaries) // len(self.topology.devices)
        return charges(self.boundaries, self.value_seconds, most_apart=max(1, share))

    @property
    def _line(self) -> Line:
        of, cuts = self._charges, self.boundaries.cuts.min(axis=0)
        none = np.zeros_like(cuts)
        first, last, link = (none, none, cuts) if self.model.overlap else (of.first, of.last, none)
        return Line(
            operators=self.boundaries.sizes,
            busy=self._busy,
            first=first,
            last=last,
            link=link,
            apart=of.apart,
            resident=self.boundaries.totals[2],
            saved=self.boundaries.totals[3],
            memory_bytes=self._most_memory if self.limits_memory else math.inf,
            in_flight=self.model.in_flight,
        )

    @property
    def _loose(self) -> Loose:
        cuts = self.boundaries.cuts.min(axis=0)
        return Loose(self._busy, cuts if self.model.overlap else np.zeros_like(cuts))

    @property
    def _busy(self) -> Vector:
        seconds, parameters = self.boundaries.totals[:2]
        busy: Vector = seconds / self._fastest + np.outer(self._all_reduce(), parameters)
        return busy

    def _pairs(self, chosen: Indices) -> Pairs:
        everything = np.arange(len(chosen))
        busy, parameters, link = self._ranges(chosen).lower_bounds(self._fastest, everything)
        if not self.model.overlap:
            busy, link = busy + link, np.zeros((len(chosen), 1))
        return Pairs(busy, parameters, link, self._all_reduce())

    @property
    def _most_memory(self) -> float:
        return max(device.memory_bytes for device in self.topology.devices)

    @property
    def _num_options(self) -> int:
        outermost = self.topology.levels[-1].size
        return outermost * min(outermost, self.most_replicas)

    @property
    def _fastest(self) -> float:
        return max(device.speed for device in self.topology.devices)

    def _all_reduce(self) -> Vector:
        """As below, on several levels over the best link there is."""
        levels, num_devices = self.topology.levels, len(self.topology.devices)
        most = min(num_devices, self.most_replicas ** len(levels))
        return self._all_reduce_over(max(map(self._most_rate, range(len(levels)))), most)

    def _all_reduce_over(self, bytes_per_second: float, most: int) -> Vector:
        """Seconds a parameter byte costs a stage, times its replicas, one entry a number of replicas."""
        once = (self.model.all_reduce_seconds_per_byte(m, bytes_per_second) * m for m in range(1, most + 1))
        return np.fromiter(once, dtype=np.float64)

    def _most_rate(self, level: int) -> float:
        """Bytes per second of an all-reduce."""
        links = self.model.links_of_first(self.topology.levels, level)
        return links * self.topology.levels[level].bytes_per_second


def _found(stages: tuple[Chosen, ...]) -> Found:
    found = Found(stages, 0.0)
    return found._replace(least_seconds=found.seconds)
