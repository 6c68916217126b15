"""The stages and the numbers of replicas that make the step fastest."""

from dataclasses import dataclass, replace

from pipec.graph import Assignment, TrainingGraph
from pipec.hardware.topology import Topology
from pipec.passes.assignments.cut_stages import assign_blocks
from pipec.passes.assignments.operator_blocks import (
    build_operator_chain,
    find_colocations,
    operator_blocks,
    operator_seconds,
    with_weight_versions,
)
from pipec.passes.assignments.update_cost import UpdateCost
from pipec.planner.cost_model import CostModel
from pipec.planner.partition import partition_chain


@dataclass(frozen=True)
class ChooseReplicas:
    """Let the planner choose stages, their numbers of replicas and the device of each replica, under 1F1B.

    No device of the topology is left unused. Costs are for a step of ``num_microbatches`` microbatches of
    ``microbatch_size`` rows, after which the replicas of a stage sum their gradients. With ``updates`` the
    schedule is asynchronous: replicas sum their gradients, and update, after one mini-batch each.

    Raises:
        PlanError: the model has no operator that takes time.
        InfeasibleError: no plan fits into the memory of the devices.
    """

    topology: Topology
    num_microbatches: int
    microbatch_size: int
    updates: UpdateCost | None = None

    def __call__(self, graph: TrainingGraph) -> Assignment:
        seconds = operator_seconds(graph, self.microbatch_size, self.updates)
        blocks = operator_blocks(seconds, find_colocations(graph))
        chain = build_operator_chain(graph, blocks, seconds, self.microbatch_size)
        num_devices = len(self.topology.devices)
        if self.updates:
            chain = with_weight_versions(chain, graph, blocks, self.updates, num_devices)
            stages = partition_chain(chain, self.topology, CostModel(), num_devices)
        else:
            model = CostModel(step_microbatches=self.num_microbatches)
            stages = partition_chain(chain, self.topology, model, self.num_microbatches)
        return replace(assign_blocks(stages, blocks), replicas=tuple(stage.replicas for stage in stages))
