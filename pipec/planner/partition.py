"""Plan a chain of blocks on a topology: which blocks form a stage, on how many replicas, on which devices.

Every device has a stage. Each stage gets one to ``replicas`` members of one class (equal devices or equal
groups) of the group that it is in (``placements``). Over all such plans that fit in memory, the slowest stage
is as fast as possible (``chain``). Of plans that are fast within a tolerance, the one that communicates least
is taken; of these the fastest; of these the one with the earliest cuts.

Memory: a replica holds the resident bytes of its stage once, and the saved bytes for each microbatch in
flight. The more devices later stages are on, the more microbatches are in flight.

This is PipeDream's recurrence (Narayanan et al., SOSP 2019, section 3.1), with classes of unequal devices.
Say D are the devices that have no stage yet. The slowest stage of the best plan for the blocks from position
k on takes, over all ends e of the next stage and all devices that it may take,

    best(k, D) = least of max(seconds of a stage from k to e on the devices taken, best(e, D - taken))

It is exact for chains of up to ``MOST_POSITIONS`` places to cut; of more, as many are looked at, where little
crosses. With the devices of each stage known, the cuts are found among ``_MOST_CUTS`` places.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipec.errors import InfeasibleError, PlanError
from pipec.hardware.topology import Topology
from pipec.planner.chain import (
    CostModel,
    OperatorChain,
    Positions,
    StageCosts,
    Vector,
    stage_costs,
)
from pipec.planner.placements import Left, Option, Placement, Placements, devices_left

TOLERANCE = 0.01
"""The costs of a model are not known better than by 1 or 2 percent.

Messages cost time while the pipeline fills and drains, so it pays to communicate less among plans whose
slowest stages cannot be told apart.
"""

_FEW_POSITIONS = 32
"""The number of positions for a first plan, so that slower ones need not be looked at."""

MOST_POSITIONS = 256

_MOST_CUTS = 4096
"""The most positions among which cuts are chosen; a quarter of them if a stage may be twice the mean."""

_ROUNDING = 1e-12
"""The relative difference that sums of the same figures in another order may have."""


@dataclass(frozen=True, slots=True)
class PartitionStage:
    """``blocks`` on every one of ``devices``, each of which takes its share of the microbatches.

    ``seconds`` are per microbatch, divided by the replicas, communication included. A replica holds
    ``resident_bytes`` once and ``saved_bytes`` for each of ``in_flight`` microbatches.
    """

    blocks: range
    devices: tuple[int, ...]
    seconds: float
    communication_seconds: float
    resident_bytes: float
    saved_bytes: float
    in_flight: int

    @property
    def memory_bytes(self) -> float:
        return self.resident_bytes + self.in_flight * self.saved_bytes

    @property
    def replicas(self) -> int:
        return len(self.devices)


def partition_chain(
    chain: OperatorChain,
    topology: Topology,
    model: CostModel,
    replicas: int | Sequence[int],
    tolerance: float = TOLERANCE,
) -> tuple[PartitionStage, ...]:
    """The stages of the best plan, in the order the forward visits them.

    A stage has up to ``replicas``, or stage k has ``replicas[k]``, on devices of one level. A plan may take
    longer than the fastest one by the share ``tolerance`` in order to communicate less.

    Raises:
        PlanError: the chain has too few blocks for every device.
        InfeasibleError: no plan fits in memory, or none was found that does.
    """
    if not chain.names:
        raise PlanError("there are no operators to plan for")
    stages = _stages(chain, topology, model, replicas, tolerance)
    if not stages:
        unlimited = _stages(chain, topology.without_memory_limits(), model, replicas, tolerance)
        if not unlimited:
            each = "" if isinstance(replicas, int) else f", {tuple(replicas)} of them for the stages"
            raise PlanError(
                f"{len(chain.names)} operators are too few for a stage on each of {len(topology.devices)} "
                f"devices{each}: a stage needs at least one operator that takes time. Use fewer devices"
            )
        raise _infeasible(unlimited, topology, is_certain=len(chain.names) < MOST_POSITIONS)
    return stages


def _stages(
    chain: OperatorChain,
    topology: Topology,
    model: CostModel,
    replicas: int | Sequence[int],
    tolerance: float,
) -> tuple[PartitionStage, ...]:
    """The stages of the best plan; none if none fits in memory."""
    costs, placements = stage_costs(chain, topology, model), Placements(topology, replicas)
    least = 2 * len(topology.devices) // (replicas if isinstance(replicas, int) else 1)
    every = functools.cache(lambda left: tuple(placements.options(left)))
    options, known, among = placements.only_options(), np.inf, np.array([], np.intp)
    for most in (_FEW_POSITIONS, MOST_POSITIONS):
        among = np.union1d(among, _promising(costs, max(most, least)))
        search = _Search(costs.at(among), placements.start(), every, known)
        known = min(known, search.fastest * (1 + _ROUNDING))
    options = options or [option for option, _ in search.within(search.fastest * (1 + tolerance))]
    if not options:
        return ()
    lefts = [placements.start(), *(option.left for option in options)]
    chosen = {left: [option] for left, option in zip(lefts, options, strict=False)}
    rate, work = sum(option.placement.rate for option in options), float(costs.seconds[-1])
    loose = min(1.0, known * rate / work - 1) if work else 1.0
    among = np.union1d(among, _promising(costs, max(int(_MOST_CUTS / max(1.0, 4 * loose)), 4 * len(options))))
    search = _Search(costs.at(among), lefts[0], chosen.__getitem__, known * (1 + tolerance))
    found = search.within(min(search.fastest, known) * (1 + tolerance))
    if not found:
        return ()
    ends = among[[0, *(end for _, end in found)]]
    stages = zip(options, ends[:-1], ends[1:], placements.devices(options), strict=True)
    return tuple(_stage(costs, option.placement, *stage) for option, *stage in stages)


@dataclass(frozen=True)
class _Best:
    """Of plans for the blocks behind each of ``positions``: the least communication, and the slowest stage.

    Both are infinite where there is no plan. Of plans that communicate equally, the fastest counts.
    """

    positions: Positions
    spent: Vector
    slowest: Vector


@dataclass(frozen=True)
class _Search:
    """The search for plans of no more than the ``known`` seconds, among the ``options`` of what is left."""

    costs: StageCosts
    start: Left
    options: Callable[[Left], Iterable[Option]]
    known: float

    @functools.cached_property
    def fastest(self) -> float:
        """The seconds of the slowest stage of the fastest plan; infinite if there is none."""
        return float(self._best(self.known, False)[self.start].slowest[0])

    def within(self, limit: float) -> list[tuple[Option, int]]:
        """The option of each stage, and the position at which it ends; none if there is no plan.

        Of plans within the limit of seconds, these are the stages that communicate least.
        """
        best = self._best(limit * (1 + _ROUNDING), True)
        left, position, stages = self.start, 0, list[tuple[Option, int]]()
        limit = float(best[left].slowest[0]) * (1 + _ROUNDING)
        while left and limit < np.inf:
            here = best[left]
            least = here.spent[here.positions.searchsorted(position)] * (1 + _ROUNDING)
            for option in self.options(left):
                if behind := best.get(option.left):
                    spent, _ = self._from(np.array([position]), option.placement, behind, limit, True)
                    if len(ends := np.flatnonzero(spent[0] <= least)):
                        left, position = option.left, int(behind.positions[ends[0]])
                        stages.append((option, position))
                        break
            else:
                raise AssertionError("the best plan is one of the options")
        return stages

    def _best(self, limit: float, communicates: bool) -> dict[Left, _Best]:
        """The best plans for what is left, within the limit; the fastest, unless communication counts."""
        spans = self._spans(limit)
        best: dict[Left, _Best] = {
            (): _Best(np.array([len(self.costs.seconds) - 1]), np.zeros(1), np.zeros(1))
        }
        for left in reversed(spans):
            first, last = spans[left]
            positions = np.arange(first, last + 1)
            least = slowest = np.full(len(positions), np.inf)
            for option in self.options(left):
                if not (behind := best.get(option.left)):
                    continue
                spent, slow = self._from(positions, option.placement, behind, limit, communicates)
                found = spent.min(axis=1)
                slow = np.where(spent <= found[:, None] * (1 + _ROUNDING), slow, np.inf).min(axis=1)
                is_less, is_equal = found < least * (1 - _ROUNDING), found <= least * (1 + _ROUNDING)
                slowest = np.where(is_less, slow, np.where(is_equal, np.minimum(slow, slowest), slowest))
                least = np.minimum(found, least)
            best[left] = _Best(positions, least, slowest)
        return best

    def _from(
        self, positions: Positions, at: Placement, behind: _Best, limit: float, communicates: bool
    ) -> tuple[Vector, Vector]:
        """The communication and the slowest stage with a stage from each position to each one behind it."""
        span = positions[:, None], behind.positions[None, :]
        slow = np.maximum(self.costs.stage_seconds(at, *span), behind.slowest)
        spent = self.costs.communication_seconds(at, *span) + behind.spent if communicates else np.zeros(())
        is_plan = slow <= limit
        return np.where(is_plan, spent, np.inf), np.where(is_plan, slow, np.inf)

    def _spans(self, limit: float) -> dict[Left, tuple[int, int]]:
        """What may be left, with the first and last position where it may begin; most devices left first.

        If the end cannot be reached, nothing is left but the start.
        """
        work, fastest = self.costs.seconds, self.costs.speed
        rounding = _ROUNDING * work[-1]
        waiting = {devices_left(self.start): {self.start: (0, 0)}}
        spans, reaches_end = dict[Left, tuple[int, int]](), False
        while waiting:
            of_most = waiting.pop(max(waiting))
            spans |= of_most
            for left, (first, last) in of_most.items():
                for option in self.options(left):
                    seconds = limit * option.placement.rate + rounding
                    end = int(work.searchsorted(work[last] + seconds, side="right")) - 1
                    end = min(end, self.costs.furthest_in_memory(option.placement, last))
                    if not option.left:
                        reaches_end = reaches_end or end == len(work) - 1
                        continue
                    remaining = devices_left(option.left)
                    nearest = work[-1] - remaining * limit * fastest - rounding
                    begin = max(first + 1, int(work.searchsorted(nearest)))
                    if begin <= end:
                        others = waiting.setdefault(remaining, {})
                        known = others.get(option.left, (begin, end))
                        others[option.left] = min(known[0], begin), max(known[1], end)
        return spans if reaches_end else {self.start: (0, 0)}


def _promising(costs: StageCosts, count: int) -> Positions:
    """At most ``count`` positions: of so many ranges of work, in each the one where least crosses."""
    everywhere = np.arange(len(costs.seconds))
    if len(everywhere) <= count:
        return everywhere
    ranges = costs.seconds.searchsorted(np.linspace(0, costs.seconds[-1], count - 1)[1:-1])
    crossing = costs.crossing.sum(axis=0)
    parts = (part for part in np.split(everywhere[1:-1], ranges) if len(part))
    return np.array([0, *(part[crossing[part].argmin()] for part in parts), everywhere[-1]])


def _stage(
    costs: StageCosts, at: Placement, first: np.intp, last: np.intp, devices: tuple[int, ...]
) -> PartitionStage:
    span = np.array(first), np.array(last)
    return PartitionStage(
        blocks=range(int(first), int(last)),
        devices=devices,
        seconds=float(costs.stage_seconds(at, *span)),
        communication_seconds=float(costs.communication_seconds(at, *span)),
        resident_bytes=float(costs.resident[last] - costs.resident[first]),
        saved_bytes=float(costs.saved[last] - costs.saved[first]),
        in_flight=costs.model.in_flight(at.later_devices),
    )


def _infeasible(stages: Sequence[PartitionStage], topology: Topology, is_certain: bool) -> InfeasibleError:
    """The error that shows what the fastest plan would need if memory were no limit."""
    none = "no plan fits" if is_certain else "of the plans that could be searched, none fits"
    lines = [f"{none} in the memory of the devices. The fastest plan without that limit would need"]
    for index, stage in enumerate(stages):
        limit = min(topology.devices[device].memory_bytes for device in stage.devices)
        short = f", {stage.memory_bytes - limit:.0f} too many" if stage.memory_bytes > limit else ""
        lines.append(
            f"  stage {index}: {stage.resident_bytes:.0f} bytes resident + {stage.saved_bytes:.0f} saved for "
            f"each of {stage.in_flight} microbatches in flight = {stage.memory_bytes:.0f} of {limit:.0f}"
            f"{short}"
        )
    lines.append("Give the devices more memory, use more of them, or save less for the backward")
    return InfeasibleError("\n".join(lines))
