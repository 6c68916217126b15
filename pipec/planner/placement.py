"""Plan a workload on a topology: which operators form a stage, on how many replicas, on which devices.

**What is optimal.** Stages are differences of consecutive downsets: no operator is on an earlier stage than
one it must follow. Each stage gets one to ``max_replicas`` members of one kind (equal devices or equal
groups) of the group it is in; in a hierarchy a member that is a group again holds a pipeline of its own, and
replicas hold the same one. Over all such plans that fit in memory, the slowest stage is as fast as possible
under the cost model (see ``pipec.planner.cost_model``). Devices may stay unused. Of plans that are equally
fast, the one on the fewest devices of the outermost group is taken; of these the one that communicates least
in sum; inside a group the same rule decides again.

Memory: a replica holds the resident bytes of its stage once, and the saved bytes for each microbatch in
flight, of which there are the more, the more devices later stages are on.

**How.** Operators that some best plan keeps together are merged (``merge``); a lower bound that ignores which
boundaries contain which tells how fast a plan can be and which boundaries it may use (``bounds``); dynamic
programming over these, level by level, is exact (``hierarchy``); ``search`` brings the last two together.
In a line of operators so long that equally fast plans cannot all be compared, one on the fewest devices is
taken without regard to communication.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipec.errors import InfeasibleError, PlanError
from pipec.hardware.topology import Topology
from pipec.planner.boundaries import Vector, boundaries
from pipec.planner.cost_model import CostModel
from pipec.planner.hierarchy import Chosen
from pipec.planner.merge import merge
from pipec.planner.partition import exact_grid, transfer_seconds
from pipec.planner.search import Search
from pipec.planner.workload import Workload, check, program_order


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """``operators`` on every one of ``devices``, each of which takes its share of the microbatches.

    Seconds are per microbatch, divided by the replicas, communication included. A replica holds
    ``resident_bytes`` once and ``saved_bytes`` for each of ``in_flight`` microbatches.
    """

    operators: tuple[int, ...]
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


@dataclass(frozen=True, slots=True)
class Placement:
    """Stages in the order the forward visits them; no plan takes less than ``least_seconds``."""

    stages: tuple[PlacedStage, ...]
    least_seconds: float

    @property
    def seconds(self) -> float:
        """Of a microbatch, in the steady state: the slowest stage's."""
        return self.stages[self.slowest].seconds

    @property
    def slowest(self) -> int:
        """The stage that bounds the step, the first if several do."""
        return max(range(len(self.stages)), key=lambda index: self.stages[index].seconds)

    @property
    def is_optimal(self) -> bool:
        """Whether the plan is proved to be the best, up to rounding."""
        return self.seconds <= self.least_seconds * (1 + 1e-9)


def place(
    workload: Workload,
    topology: Topology,
    model: CostModel,
    max_replicas: int | None = None,
    *,
    every_device: bool = False,
) -> Placement:
    """The best plan, or of those that leave no device unused the best.

    PlanError if the workload is malformed, has too many independent operators to search all of it, or too
    few for every device; InfeasibleError if no plan fits in memory, or none was found that does.
    """
    check(workload)
    order = program_order(workload)
    updates = model.microbatches_per_update or len(topology.devices)
    most_replicas = min(max_replicas or len(topology.devices), updates)
    limits_memory = _may_run_out(workload, topology, model)

    def solve(limits_memory: bool) -> Placement:
        return _solve(workload, order, topology, model, most_replicas, limits_memory, every_device)

    placement = solve(limits_memory)
    if not placement.stages:
        is_certain = placement.least_seconds == math.inf
        unlimited = solve(limits_memory=False).stages
        if not unlimited:
            raise PlanError(
                f"{len(order)} operators are too few for a stage on each of {len(topology.devices)} devices"
            )
        raise _infeasible(unlimited, topology, is_certain)
    return placement


def _solve(
    workload: Workload,
    order: Sequence[int],
    topology: Topology,
    model: CostModel,
    most_replicas: int,
    limits_memory: bool,
    every_device: bool,
) -> Placement:
    """The best plan; without stages if there is none, or none fits in memory."""
    seconds, value_seconds = _on_a_grid(workload, topology)
    idle = [0.0] * len(order)
    relevant = replace(
        workload,
        seconds=seconds,
        parameter_bytes=workload.parameter_bytes if most_replicas > 1 else idle,
        resident_bytes=workload.resident_bytes if limits_memory else idle,
        saved_bytes=workload.saved_bytes if limits_memory else idle,
    )
    slowest = min(device.speed for device in topology.devices)
    merged = merge(relevant, order, value_seconds, model.overlap, slowest)
    found = boundaries(merged.workload, program_order(merged.workload), value_seconds)
    search = Search(found, value_seconds, topology, model, most_replicas, limits_memory, every_device)
    best = search.run()
    stages = tuple(
        _placed(workload, model, merged.originals(found.between(stage.first, stage.last)), stage)
        for stage in best.stages
    )
    return Placement(stages, best.least_seconds)


def _on_a_grid(workload: Workload, topology: Topology) -> tuple[list[float], Vector]:
    """Seconds of operators, and [level, transfer] of values, rounded so that every sum of them is exact.

    The grid is finer than 1e-15 of the sum of all. Stages of equal operators tie, wherever they stand.
    """
    seconds = np.asarray(workload.seconds, dtype=np.float64)
    of_values = [
        [
            transfer_seconds(value, level.bytes_per_second, level.latency_seconds)
            for value in workload.transfers
        ]
        for level in topology.levels
    ]
    value_seconds = np.array(of_values).reshape(len(topology.levels), -1)
    grid = exact_grid(float(seconds.sum() + 4 * value_seconds.sum()))
    return (np.rint(seconds / grid) * grid).tolist(), np.rint(value_seconds / grid) * grid


def _may_run_out(workload: Workload, topology: Topology, model: CostModel) -> bool:
    """Whether any device could be too small for any stage."""
    most_in_flight = model.in_flight(len(topology.devices))
    most = sum(workload.resident_bytes) + most_in_flight * sum(workload.saved_bytes)
    return most > min(device.memory_bytes for device in topology.devices)


def _placed(workload: Workload, model: CostModel, operators: tuple[int, ...], stage: Chosen) -> PlacedStage:
    return PlacedStage(
        operators=operators,
        devices=stage.devices,
        seconds=stage.seconds,
        communication_seconds=stage.communication_seconds,
        resident_bytes=sum(workload.resident_bytes[op] for op in operators),
        saved_bytes=sum(workload.saved_bytes[op] for op in operators),
        in_flight=model.in_flight(stage.after),
    )


def _infeasible(stages: Sequence[PlacedStage], topology: Topology, is_certain: bool) -> InfeasibleError:
    """The error that shows what the fastest plan would need if memory were no limit."""
    none = "no plan fits" if is_certain else "of the plans that could be searched, none fits"
    lines = []
    for index, stage in enumerate(stages):
        limit = min(topology.devices[device].memory_bytes for device in stage.devices)
        short = f", {stage.memory_bytes - limit:.0f} too many" if stage.memory_bytes > limit else ""
        lines.append(
            f"  stage {index}: {stage.resident_bytes:.0f} bytes resident + {stage.saved_bytes:.0f} saved for "
            f"each of {stage.in_flight} microbatches in flight = {stage.memory_bytes:.0f} of {limit:.0f}"
            f"{short}"
        )
    return InfeasibleError(
        f"{none} in the memory of the devices. The fastest plan without that limit would need\n"
        + "\n".join(lines)
        + "\nGive the devices more memory, use more of them, or save less for the backward"
    )
