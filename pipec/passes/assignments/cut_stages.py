"""As many stages as devices, the slowest of them as fast as possible."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipec.errors import PlanError
from pipec.graph import Assignment, TrainingGraph, permuted_ranks
from pipec.hardware.topology import Topology
from pipec.passes.assignments.operator_blocks import (
    Colocation,
    build_operator_graph,
    find_colocations,
    operator_blocks,
    operator_seconds,
    with_weight_versions,
)
from pipec.passes.assignments.update_cost import UpdateCost
from pipec.planner.cost_model import PIPEC
from pipec.planner.partition import TOLERANCE, PartitionStage, partition_graph


@dataclass(frozen=True)
class CutStages:
    """Cut so that the slowest stage is as fast as possible, within the tolerance of ``planner.placement``.

    There is one stage on each device of the topology. Device d is rank d, and the stages go to the ranks in
    the best order: in order if the devices and links are alike. Costs are those of microbatches of
    ``microbatch_size`` rows, with the ``updates`` that stages make after each mini-batch, if they do. Where
    memory is limited, rank k of a schedule has ``in_flight[k]`` of these at once.

    Raises:
        PlanError: there are fewer operators than devices.
        InfeasibleError: no cut fits into the memory of the devices.
    """

    topology: Topology
    microbatch_size: int
    in_flight: tuple[int, ...] = ()
    updates: UpdateCost | None = None

    def __call__(self, graph: TrainingGraph) -> Assignment:
        seconds = operator_seconds(graph, self.microbatch_size, self.updates)
        colocations = find_colocations(graph)
        blocks = operator_blocks(seconds, colocations)
        self._check_enough(graph, blocks[-1] + 1 if blocks else 0, colocations)
        model = replace(PIPEC, in_flight=self._in_flight)
        operators = build_operator_graph(graph, blocks, seconds, self.microbatch_size)
        if self.updates:
            num_stages = len(self.topology.devices)
            operators = with_weight_versions(operators, graph, blocks, self.updates, num_stages)
        stages = partition_graph(
            operators, self.topology, model, max_replicas=1, use_all_devices=True, tolerance=TOLERANCE
        ).stages
        return assign_blocks(stages, blocks)

    def _check_enough(self, graph: TrainingGraph, num_blocks: int, colocations: Sequence[Colocation]) -> None:
        """Say so if it is what belongs together that leaves fewer blocks than devices."""
        num_devices = len(self.topology.devices)
        if colocations and num_blocks < num_devices:
            widest = max(colocations, key=lambda span: span.last - span.first)
            places = [graph.operators[op] for op in (widest.first, widest.last)]
            where = " to ".join(
                f"{made.name} of {made.module or 'the model'} ({made.source})" for made in places
            )
            raise PlanError(
                f"there are {num_devices} devices, but the model falls into {num_blocks} parts, because "
                f"{widest.reason}: whatever reads or changes it is on one stage, from {where}. "
                "Use fewer devices, give each use a buffer of its own, or pad to a size that is known."
            )

    def _in_flight(self, later_devices: int) -> int:
        """Of a rank that ``later_devices`` follow: at least as many as of these, as the planner asks for."""
        return max(self.in_flight[-1 - later_devices :], default=0)


def assign_blocks(stages: Sequence[PartitionStage], blocks: Sequence[int]) -> Assignment:
    """The stages of a partition, and their devices, for operators in these ``blocks``."""
    stage_of = {block: k for k, stage in enumerate(stages) for block in stage.operators}
    ranks = tuple(device for stage in stages for device in stage.devices)
    return Assignment(tuple(stage_of[block] for block in blocks), len(stages), permuted_ranks(ranks))
