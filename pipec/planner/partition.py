"""Plan a chain of blocks on a topology: which blocks form a stage, on how many replicas, on which devices.

Every device has a stage. Each stage gets one to ``max_replicas`` members of one class (equal devices or equal
groups) of the group that it is in (``placements``). Over all such plans that fit in memory, the slowest stage
is as fast as possible (``cost_model``). Of plans that are fast within a tolerance, the one that communicates
least is taken; of these the fastest, to 0.1%; of these the one with the earliest cuts.

Memory: a replica holds the resident bytes of its stage once, and the saved bytes for each microbatch in
flight. The more devices later stages are on, the more microbatches are in flight.

Stages get their devices first (``structure``). This is exact for up to ``MOST_POSITIONS`` places to cut; of
more, as many are looked at, where little crosses. With the devices known, the cuts are exact (``cuts``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipec.errors import InfeasibleError, PlanError
from pipec.hardware.topology import Topology
from pipec.planner.cost_model import CostModel, Positions, StageCosts, stage_costs
from pipec.planner.cuts import best_cuts
from pipec.planner.operator_chain import OperatorChain, check_operator_chain
from pipec.planner.placements import Placement, Placements
from pipec.planner.structure import best_placements

TOLERANCE = 0.01
"""The costs of a model are not known better than by 1 or 2 percent.

Messages cost time while the pipeline fills and drains, so it pays to communicate less among plans whose
slowest stages cannot be told apart.
"""

_FEW_POSITIONS = 32
"""The number of positions for a first plan, so that slower ones need not be looked at."""

MOST_POSITIONS = 256

_MOST_CUTS = 4096
"""The most positions among which cuts are chosen, however many there are."""


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
    max_replicas: int,
    tolerance: float = TOLERANCE,
) -> tuple[PartitionStage, ...]:
    """The stages of the best plan, in the order the forward visits them.

    A plan may take longer than the fastest one by the share ``tolerance`` in order to communicate less.

    Raises:
        PlanError: the chain is malformed, or has too few blocks for every device.
        InfeasibleError: no plan fits in memory, or none was found that does.
    """
    check_operator_chain(chain)
    stages = _stages(chain, topology, model, max_replicas, tolerance)
    if not stages:
        unlimited = _stages(chain, topology.without_memory_limits(), model, max_replicas, tolerance)
        if not unlimited:
            raise PlanError(
                f"{len(chain.names)} operators are too few for a stage on each of {len(topology.devices)} "
                f"devices: a stage needs at least one operator that takes time. Use fewer devices"
            )
        raise _infeasible(unlimited, topology, is_certain=len(chain.names) < MOST_POSITIONS)
    return stages


def _stages(
    chain: OperatorChain, topology: Topology, model: CostModel, max_replicas: int, tolerance: float
) -> tuple[PartitionStage, ...]:
    """The stages of the best plan; none if none fits in memory."""
    if not _may_run_out(chain, topology, model):
        topology = topology.without_memory_limits()
    costs, num_devices = stage_costs(chain, topology.levels, model), len(topology.devices)
    placements = Placements(topology, max_replicas)
    options, fastest = placements.only_options(), math.inf
    if not options:
        some = costs.at(_promising(costs, max(MOST_POSITIONS, 2 * num_devices // max_replicas)))
        known, _ = best_placements(some.at(_promising(some, _FEW_POSITIONS)), placements, tolerance=0.0)
        fastest, options = best_placements(some, placements, tolerance, known)
    places = [option.placement for option in options]
    among = _promising(costs, max(_MOST_CUTS, 4 * len(places)))
    cuts = best_cuts(costs.at(among), places, tolerance, fastest) if places else None
    if cuts is None:
        return ()
    ends = among[cuts]
    stages = zip(places, ends[:-1], ends[1:], placements.devices(options), strict=True)
    return tuple(_stage(costs, *stage) for stage in stages)


def _may_run_out(chain: OperatorChain, topology: Topology, model: CostModel) -> bool:
    """Whether any device could be too small for any stage."""
    most_in_flight = model.in_flight(len(topology.devices))
    most = sum(chain.resident_bytes) + most_in_flight * sum(chain.saved_bytes)
    return most > min(device.memory_bytes for device in topology.devices)


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
