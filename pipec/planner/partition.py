"""Plan a graph on a topology: which operators form a stage, on how many replicas, on which devices.

**What is optimal.** Stages are differences of consecutive downsets: no operator is on an earlier stage than
one that it must follow. Each stage gets one to ``max_replicas`` members of one kind (equal devices or equal
groups) of the group that it is in. In a hierarchy a member that is a group again holds a pipeline of its own,
and replicas hold the same one. Over all such plans that fit in memory, the slowest stage is as fast as
possible under the cost model (see ``pipec.planner.cost_model``). Devices may stay unused. Of plans that are
equally fast, or fast within a tolerance, one on the fewest members of the outermost group is taken; of these
the ones that communicate least in sum; of these the fastest, to 0.1%; of these the one with the earliest
cuts. Inside a group the same rule decides again.

Memory: a replica holds the resident bytes of its stage once, and the saved bytes for each microbatch in
flight. The more devices later stages are on, the more microbatches are in flight.

**How.** Operators that some best plan keeps together are merged (``merge``). A lower bound that ignores which
downsets contain which tells how fast a plan can be and which downsets it may use (``bounds``). Dynamic
programming over these, level by level, is exact (``hierarchy``). ``solver`` brings bounds and dynamic
programming together. In a chain so long that equally fast plans cannot all be compared, a fastest plan on the
fewest devices is taken without regard to communication.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipec.errors import InfeasibleError, PlanError
from pipec.hardware.topology import Topology
from pipec.planner.cost_model import CostModel
from pipec.planner.downsets import Vector, list_downsets
from pipec.planner.hierarchy import StageInterval
from pipec.planner.merge import merge_operators
from pipec.planner.operator_graph import OperatorGraph, check_operator_graph, topological_order
from pipec.planner.solver import Solver

TOLERANCE = 0.01
"""For plans from the costs of a model, which are not known better than by 1 or 2 percent.

Messages cost time while the pipeline fills and drains, so it pays to communicate less among plans whose
slowest stages cannot be told apart.
"""


@dataclass(frozen=True, slots=True)
class PartitionStage:
    """``operators`` on every one of ``devices``, each of which takes its share of the microbatches.

    ``seconds`` are per microbatch, divided by the replicas, communication included. A replica holds
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
class Partition:
    """Stages in the order the forward visits them. No plan takes less than ``lower_bound_seconds``."""

    stages: tuple[PartitionStage, ...]
    lower_bound_seconds: float

    @property
    def seconds(self) -> float:
        """The seconds of the slowest stage: what a microbatch takes in the steady state."""
        return self.stages[self.bottleneck_stage].seconds

    @property
    def bottleneck_stage(self) -> int:
        """The stage that bounds the step, the first if several do."""
        return max(range(len(self.stages)), key=lambda index: self.stages[index].seconds)

    @property
    def is_optimal(self) -> bool:
        """Whether no plan is faster, up to rounding. A plan taken within a tolerance may not be optimal."""
        return self.seconds <= self.lower_bound_seconds * (1 + 1e-9)


def partition_graph(
    graph: OperatorGraph,
    topology: Topology,
    model: CostModel,
    max_replicas: int | None = None,
    *,
    use_all_devices: bool = False,
    tolerance: float = 0.0,
) -> Partition:
    """The best plan, or the best of those that leave no device unused.

    A plan may take longer than the fastest one by the share ``tolerance`` in order to communicate less.

    Raises:
        PlanError: the graph is malformed, or has too few operators for every device.
        InfeasibleError: no plan fits in memory, or none was found that does.
    """
    check_operator_graph(graph)
    order = topological_order(graph)
    most_replicas = min(max_replicas or len(topology.devices), len(topology.devices))

    def solve(limits_memory: bool) -> Partition:
        return _solve(graph, order, topology, model, most_replicas, limits_memory, use_all_devices, tolerance)

    too_few = PlanError(
        f"{len(order)} operators are too few for a stage on each of {len(topology.devices)} devices: "
        f"a stage needs at least one operator that takes time. Use fewer devices"
    )
    if use_all_devices and most_replicas == 1 and len(order) < len(topology.devices):
        raise too_few
    found = solve(_may_run_out(graph, topology, model))
    if not found.stages:
        unlimited = solve(limits_memory=False).stages
        if use_all_devices and not unlimited:
            raise too_few
        raise _infeasible(unlimited, topology, is_certain=found.lower_bound_seconds == math.inf)
    return found


def _solve(
    graph: OperatorGraph,
    order: Sequence[int],
    topology: Topology,
    model: CostModel,
    most_replicas: int,
    limits_memory: bool,
    use_all_devices: bool,
    tolerance: float,
) -> Partition:
    """The best plan; without stages if there is none, or none fits in memory."""
    seconds, value_seconds = _on_a_grid(graph, topology, model)
    idle = [0.0] * len(order)
    relevant = replace(
        graph,
        seconds=seconds,
        parameter_bytes=graph.parameter_bytes if most_replicas > 1 else idle,
        resident_bytes=graph.resident_bytes if limits_memory else idle,
        saved_bytes=graph.saved_bytes if limits_memory else idle,
    )
    slowest = min(device.speed for device in topology.devices)
    merged = merge_operators(relevant, order, value_seconds, model.overlap, slowest)
    downsets = list_downsets(merged.graph, topological_order(merged.graph), value_seconds)
    solver = Solver(
        downsets, value_seconds, topology, model, most_replicas, limits_memory, use_all_devices, tolerance
    )
    best = solver.run()
    stages = tuple(
        _placed(graph, model, merged.originals(downsets.stage_operators(stage.first, stage.last)), stage)
        for stage in best.stages
    )
    return Partition(stages, best.lower_bound_seconds)


def _on_a_grid(graph: OperatorGraph, topology: Topology, model: CostModel) -> tuple[list[float], Vector]:
    """Seconds of operators, and [level, value] of transfers, rounded so that every sum of them is exact.

    The grid is finer than 1e-15 of the sum of all. For example, three equal operators of 0.1 seconds take
    just as long as three others, wherever they stand, though 0.1 + 0.1 + 0.1 is not 0.3 in floating point.
    """
    seconds = np.asarray(graph.seconds, dtype=np.float64)
    of_values = [
        [model.value_seconds(value, level) for value in graph.transfers] for level in topology.levels
    ]
    value_seconds = np.array(of_values).reshape(len(topology.levels), -1)
    largest_sum = float(seconds.sum() + 4 * value_seconds.sum())
    grid = max(math.ldexp(1.0, math.frexp(largest_sum)[1] - 51), sys.float_info.min)
    return (np.rint(seconds / grid) * grid).tolist(), np.rint(value_seconds / grid) * grid


def _may_run_out(graph: OperatorGraph, topology: Topology, model: CostModel) -> bool:
    """Whether any device could be too small for any stage."""
    most_in_flight = model.in_flight(len(topology.devices))
    most = sum(graph.resident_bytes) + most_in_flight * sum(graph.saved_bytes)
    return most > min(device.memory_bytes for device in topology.devices)


def _placed(
    graph: OperatorGraph, model: CostModel, operators: tuple[int, ...], stage: StageInterval
) -> PartitionStage:
    return PartitionStage(
        operators=operators,
        devices=stage.devices,
        seconds=stage.seconds,
        communication_seconds=stage.communication_seconds,
        resident_bytes=sum(graph.resident_bytes[op] for op in operators),
        saved_bytes=sum(graph.saved_bytes[op] for op in operators),
        in_flight=model.in_flight(stage.after),
    )


def _infeasible(stages: Sequence[PartitionStage], topology: Topology, is_certain: bool) -> InfeasibleError:
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
    needs = " The fastest plan without that limit would need" if stages else ""
    return InfeasibleError(
        "\n".join([f"{none} in the memory of the devices.{needs}", *lines])
        + "\nGive the devices more memory, use more of them, or save less for the backward"
    )
