"""Stages, and as many ranks for each of them, as make the step fastest."""

from dataclasses import dataclass, replace

from pipec.graph import Assignment, TrainingGraph
from pipec.hardware.topology import Topology
from pipec.passes.assignments.cut_stages import assign_blocks
from pipec.passes.assignments.operator_blocks import (
    build_operator_graph,
    find_colocations,
    operator_blocks,
    operator_seconds,
    with_weight_versions,
)
from pipec.passes.assignments.update_cost import UpdateCost
from pipec.planner.cost_model import PIPEC, CostModel
from pipec.planner.partition import TOLERANCE, partition_graph


@dataclass(frozen=True)
class ChooseReplicas:
    """Let the planner choose stages, their numbers of replicas and the device of each, under 1F1B.

    No device of the topology is left unused. Costs are those of steps of ``num_microbatches`` microbatches
    with ``microbatch_size`` rows, of which each stage with replicas sums its gradients once. With ``updates``
    there is no flush: replicas sum their gradients, and update, after one mini-batch of each of them. Stages
    take what ``model`` says.

    Raises:
        PlanError: the model has no operator that takes time.
        InfeasibleError: no plan fits into the memory of the devices.
    """

    topology: Topology
    num_microbatches: int
    microbatch_size: int
    updates: UpdateCost | None = None
    model: CostModel = PIPEC

    def __call__(self, graph: TrainingGraph) -> Assignment:
        seconds = operator_seconds(graph, self.microbatch_size, self.updates)
        blocks = operator_blocks(seconds, find_colocations(graph))
        operators = build_operator_graph(graph, blocks, seconds, self.microbatch_size)
        most, model = self.num_microbatches, replace(self.model, step_microbatches=self.num_microbatches)
        if self.updates:
            most = num_devices = len(self.topology.devices)
            operators, model = (
                with_weight_versions(operators, graph, blocks, self.updates, num_devices),
                self.model,
            )
        stages = partition_graph(
            operators, self.topology, model, max_replicas=most, use_all_devices=True, tolerance=TOLERANCE
        ).stages
        return replace(assign_blocks(stages, blocks), replicas=tuple(stage.replicas for stage in stages))
