"""From downsets to stages: bounds first, so that only downsets that a best plan may use are compared.

Small problems need no bounds. Otherwise the first limit is the least seconds that a bound allows. It is
raised until the best plan over the remaining downsets is within it: then no other plan is faster. If more
downsets remain than can be compared, the result is the best plan over the most promising ones, and the bound
says how much faster another plan could be. If there are many downsets, a loose bound, which examines each
downset by itself, leaves fewer for a close bound, which examines pairs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipec.hardware.topology import Topology
from pipec.planner.bounds import ROUNDING, Bound, DeviceCounts, DownsetBound, lower_bound_seconds
from pipec.planner.chain_bound import ChainBound
from pipec.planner.containment_bound import ContainmentBound
from pipec.planner.cost_model import CostModel
from pipec.planner.device_groups import nested_groups
from pipec.planner.downsets import Downsets, Indices, Vector
from pipec.planner.hierarchy import HierarchicalPartitioner, StageInterval, Useful
from pipec.planner.pair_bound import PairBound
from pipec.planner.stage_cost_matrices import StageCostMatrices, stage_cost_matrices
from pipec.planner.stage_options import StageOptions

if TYPE_CHECKING:
    from pipec.planner.work_windows import WorkWindows

_FEW_OPTIONS = 64
"""Up to this product of devices and replicas of a stage, trying all options is faster than bounds."""

_FEW_STEPS = 10**6
"""Up to this product of pairs of downsets and options, trying all is faster than bounds."""

_MAX_PAIRED = 3000
"""The most downsets that are compared in pairs; this takes seconds."""

_MAX_IN_CHAIN = 4096
"""The most downsets of a chain that are compared in pairs: its bounds are closer."""

_MAX_WITHOUT_LOOSE_BOUND = 3000
"""The most downsets for which no loose bound is used first."""

_MAX_NESTED = 300
"""The most downsets that are compared in pairs if each pair needs a pipeline inside a group."""

_NUM_PROMISING = 800
"""The number of downsets that are compared if too many remain."""

_CLOSE = 1e-3
"""The relative tolerance of bisection, unless the bound is exact: dynamic programming finds the rest."""

_NO_FASTER = 1e-10
"""The share of the seconds that a faster plan must save to be sought."""

_SLACKS = (1e-9, 1e-3, 1e-2, 1e-1, math.inf)
"""The shares by which the limit exceeds the bound, one for each attempt."""


class SolverResult(NamedTuple):
    """The best stages found; none if none fit in memory.

    ``fastest``: the seconds of the fastest plan found; the stages may take longer by the tolerance.
    ``lower_bound_seconds``: a lower bound of every plan's seconds.
    """

    stages: tuple[StageInterval, ...]
    fastest: float
    lower_bound_seconds: float


_NO_RESULT = SolverResult((), math.inf, 0.0)

_Solve = Callable[[Indices, DeviceCounts, DeviceCounts, float], SolverResult]
"""Finds the best stages over some downsets, given the fewest devices to finish from each and to reach it, and
the seconds of a known plan."""


@dataclass(frozen=True)
class Solver:
    """A problem over ``downsets``; ``value_seconds[level, value]`` are the seconds of transfers.

    A stage has up to ``most_replicas`` at each level. A plan may take longer than the fastest one by the
    share ``tolerance`` if it communicates less.
    """

    downsets: Downsets
    value_seconds: Vector
    topology: Topology
    model: CostModel
    most_replicas: int
    limits_memory: bool
    use_all_devices: bool
    tolerance: float

    def run(self) -> SolverResult:
        found = self._over_all()
        if self.downsets.windows is None:
            return found
        return found._replace(
            lower_bound_seconds=min(self._least_of_any(self.downsets.windows), found.fastest)
        )

    def _over_all(self) -> SolverResult:
        """The best stages over all downsets that are listed."""
        everything = np.arange(len(self.downsets))
        many = len(everything) > _MAX_WITHOUT_LOOSE_BOUND
        if self._num_options * len(everything) ** 2 <= _FEW_STEPS:
            return self._all_of(everything)
        if not (many or self._chain_is_exact):
            return self._over_pairs(everything, math.inf)
        bound = self._chain_bound if self.downsets.is_chain else self._loose_bound
        closeness = 0.0 if many and self._chain_is_exact else _CLOSE
        solve: _Solve = self._with_new_bound
        most = _MAX_PAIRED
        if self._chain_is_exact:
            solve, most = self._within_reach, _MAX_IN_CHAIN
        found = self._raise_limit(everything, bound, closeness, most, math.inf, solve)
        if self._containment_is_exact:
            return self._lower_limit(found)
        least = max(found.lower_bound_seconds, self._least_between_groups())
        return found._replace(lower_bound_seconds=min(least, found.fastest))

    def _over_pairs(self, chosen: Indices, known: float) -> SolverResult:
        """The best stages over ``chosen`` downsets, compared in pairs, given the seconds of a known plan."""
        most = _MAX_PAIRED if len(self.topology.levels) == 1 else _MAX_NESTED
        few = self._num_options <= _FEW_OPTIONS and len(chosen) <= most
        if few or self._num_options * len(chosen) ** 2 <= _FEW_STEPS:
            return self._all_of(chosen)
        bound = self._pair_bound(chosen)
        return self._raise_limit(chosen, bound, _CLOSE, most, known, self._within_reach)

    def _with_new_bound(
        self, chosen: Indices, _finish: DeviceCounts, _reach: DeviceCounts, known: float
    ) -> SolverResult:
        return self._over_pairs(chosen, known)

    def _within_reach(
        self, chosen: Indices, finish: DeviceCounts, reach: DeviceCounts, _known: float
    ) -> SolverResult:
        num_devices = len(self.topology.devices)
        useful = [
            np.flatnonzero((finish <= count) & (reach <= num_devices - count))
            for count in range(num_devices + 1)
        ]
        return self._exactly(chosen, lambda count: useful[count])

    def _all_of(self, chosen: Indices) -> SolverResult:
        return self._exactly(chosen, lambda _: np.arange(len(chosen)))

    def _exactly(self, chosen: Indices, useful: Useful) -> SolverResult:
        memory_depends_on_later_stages = self.limits_memory and bool(self.downsets.totals[3].any())
        costs = self._costs(chosen)
        options = StageOptions(self.most_replicas, memory_depends_on_later_stages, self.use_all_devices)
        hierarchy = HierarchicalPartitioner(costs, options, self.tolerance)
        fastest, found = hierarchy.best_pipeline(nested_groups(self.topology), useful)
        stages = (
            stage._replace(first=int(chosen[stage.first]), last=int(chosen[stage.last])) for stage in found
        )
        return SolverResult(tuple(stages), fastest, fastest)

    def _raise_limit(
        self, chosen: Indices, bound: Bound, closeness: float, most: int, known: float, solve: _Solve
    ) -> SolverResult:
        """The best plan over ``chosen`` downsets; ``solve`` takes at most ``most`` of them."""
        num_devices = len(self.topology.devices)
        least = lower_bound_seconds(bound, num_devices, closeness, known)
        best, proven = _NO_RESULT, least / (1 + max(closeness, ROUNDING))
        for slack in _SLACKS if least < math.inf else ():
            limit = min(least * (1 + slack) if slack < math.inf else math.inf, best.fastest)
            needed = bound.devices_needed(num_devices, limit * (1 + self.tolerance))
            assert needed is not None, "the bound allows a plan within its limit"
            finish, reach = needed
            usable = needed.usable_downsets(num_devices)
            complete = len(usable) <= most
            if not complete:
                usable = self._promising(chosen, usable, bound, finish, limit, most)
            found = solve(chosen[usable], finish[usable], reach[usable], best.fastest)
            best = min(found, best, key=lambda found: found.fastest)
            if complete:
                proven = max(proven, min(limit, found.lower_bound_seconds))
            if best.fastest <= limit or (best.stages and not complete):
                break
        return best._replace(lower_bound_seconds=min(proven, best.fastest))

    def _lower_limit(self, best: SolverResult) -> SolverResult:
        """The fastest plan, given a good one.

        Alternates between limits just below the best plan, and half-way to the lower bound.
        """
        num_devices = len(self.topology.devices)
        bound = ContainmentBound(self.downsets, self._busy, self.downsets.cuts[0])
        low, just_below = best.lower_bound_seconds, True
        while low < (below := best.fastest * (1 - _NO_FASTER)):
            limit = below if just_below else (low + best.fastest) / 2
            finish = bound.finish(num_devices, limit)
            if finish[0] > num_devices:
                low, just_below = limit, False
            else:
                best = self._all_of(np.array(bound.plan(finish, limit)))
                just_below = not just_below
        return best._replace(lower_bound_seconds=min(low, best.fastest))

    def _promising(
        self, chosen: Indices, usable: Indices, bound: Bound, finish: DeviceCounts, limit: float, most: int
    ) -> Indices:
        """Some of too many usable downsets: in a chain those of a plan within the bound, and the cheapest."""
        plan = [0, len(chosen) - 1]
        if isinstance(bound, ChainBound):
            plan = bound.plan(finish, limit)
            if self._chain_is_exact:
                return np.array(plan)
        count = min(most, _NUM_PROMISING)
        cheapest = np.argsort(self.downsets.cuts[0, chosen[usable]], kind="stable")[:count]
        return np.union1d(plan, usable[cheapest])

    def _least_of_any(self, windows: "WorkWindows") -> float:
        """A lower bound of all plans, whichever downsets they use."""
        before, until = (self._busy_of(*totals[:2]) for totals in (windows.most, windows.least))
        bound = DownsetBound(before, until, self._links(windows.cuts))
        at_will = self.downsets.totals[0, -1] / sum(device.speed for device in self.topology.devices)
        least = lower_bound_seconds(bound, len(self.topology.devices), _CLOSE, math.inf) / (1 + _CLOSE)
        return max(float(at_will), least)

    def _least_between_groups(self) -> float:
        """A bound that treats each outermost group as one device with the speed of all its devices."""
        levels, devices = self.topology.levels, self.topology.devices
        num_groups, cuts = levels[-1].size, self.downsets.cuts[-1]
        size = len(devices) // num_groups
        speeds = (sum(device.speed for device in devices[k : k + size]) for k in range(0, len(devices), size))
        all_reduce = self._all_reduce_over(
            self._most_rate(len(levels) - 1), min(num_groups, self.most_replicas)
        )
        seconds, parameters = self.downsets.totals[:2]
        busy = seconds / max(speeds) + np.outer(all_reduce, parameters)
        bound = DownsetBound(busy, busy, self._links(cuts))
        return lower_bound_seconds(bound, num_groups, _CLOSE, math.inf) / (1 + _CLOSE)

    def _costs(self, chosen: Indices) -> StageCostMatrices:
        return stage_cost_matrices(
            self.downsets.select(chosen), self.value_seconds, self.topology.levels, self.model
        )

    @property
    def _chain_is_exact(self) -> bool:
        """Whether the bound of a chain charges stages their exact cost."""
        return self.downsets.is_chain and self._devices_are_simple

    @property
    def _containment_is_exact(self) -> bool:
        restricted = self.limits_memory or self.use_all_devices
        return self.downsets.windows is None and self._devices_are_simple and not restricted

    @property
    def _devices_are_simple(self) -> bool:
        """Whether devices and links are equal, and a bound knows all their costs."""
        are_equal = len(self.topology.levels) == len(set(self.topology.devices)) == 1
        has_latency = self.most_replicas > 1 and self.topology.levels[0].latency_seconds > 0
        return self.model.overlap and are_equal and not has_latency

    @property
    def _chain_bound(self) -> ChainBound:
        return ChainBound(
            busy=self._busy,
            link=self._links(self.downsets.cuts.min(axis=0)),
            resident=self.downsets.totals[2],
            saved=self.downsets.totals[3],
            memory_bytes=self._most_memory if self.limits_memory else math.inf,
            in_flight=self.model.in_flight,
        )

    @property
    def _loose_bound(self) -> DownsetBound:
        return DownsetBound(self._busy, self._busy, self._links(self.downsets.cuts.min(axis=0)))

    def _pair_bound(self, chosen: Indices) -> PairBound:
        everything = np.arange(len(chosen))
        busy, parameters, link = self._costs(chosen).lower_bounds(self._fastest, everything)
        if not self.model.overlap:
            busy, link = busy + link, np.zeros((len(chosen), 1))
        return PairBound(busy, parameters, link, self._all_reduce())

    def _links(self, cuts: Vector) -> Vector:
        """The seconds that a bound may charge for links alone."""
        return cuts if self.model.overlap else np.zeros_like(cuts)

    @property
    def _busy(self) -> Vector:
        return self._busy_of(*self.downsets.totals[:2])

    def _busy_of(self, seconds: Vector, parameters: Vector) -> Vector:
        """The least busy seconds for 1 or more replicas, times the replicas."""
        busy: Vector = seconds / self._fastest + np.outer(self._all_reduce(), parameters)
        return busy

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
        """``_all_reduce_over`` the best link of any level."""
        levels, num_devices = self.topology.levels, len(self.topology.devices)
        most = min(num_devices, self.most_replicas ** len(levels))
        return self._all_reduce_over(max(map(self._most_rate, range(len(levels)))), most)

    def _all_reduce_over(self, bytes_per_second: float, most: int) -> Vector:
        """For 1 to ``most`` replicas, the seconds that a parameter byte costs a stage, times the replicas."""
        once = (self.model.all_reduce_seconds_per_byte(m, bytes_per_second) * m for m in range(1, most + 1))
        return np.fromiter(once, dtype=np.float64)

    def _most_rate(self, level: int) -> float:
        """Bytes per second of an all-reduce."""
        links = self.model.links_of_first(self.topology.levels, level)
        return links * self.topology.levels[level].bytes_per_second
