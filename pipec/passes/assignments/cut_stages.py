"""The stages of each device, the slowest as fast as possible."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipec.errors import PlanError
from pipec.graph import Assignment, TrainingGraph, permuted_ranks
from pipec.hardware.topology import Topology
from pipec.passes.assignments.operator_blocks import (
    Colocation,
    UpdateCost,
    build_operator_chain,
    find_colocations,
    operator_blocks,
    operator_seconds,
    with_weight_versions,
)
from pipec.planner.chain import CostModel, OperatorChain, one_f_one_b
from pipec.planner.partition import partition_chain


@dataclass(frozen=True)
class CutStages:
    """Cut so that the slowest stage is as fast as possible, within the tolerance of ``planner.partition``.

    Each device of the topology has one stage; or stage k has ``replicas[k]`` devices; or the planner chooses
    stages with up to ``replicas`` devices. Device d is rank d, and stages are placed on ranks in the best
    order, which is their own order if devices and links are equal. Costs are for steps of
    ``num_microbatches`` microbatches of ``microbatch_size`` rows, with the ``updates`` of an asynchronous
    schedule after each mini-batch. Where memory is limited, rank k of a schedule has ``in_flight[k]``
    microbatches in flight, or as many as under 1F1B if it is None. With ``between_modules`` no module with
    operators of its own is divided.

    If stages take turns on a device, what one hands to the next waits there from all forwards to all
    backwards, and their seconds add up however they are cut. So a ``narrow`` cut is made where few bytes
    cross, at one of twice as many places as there are cuts.

    Raises:
        PlanError: there are fewer operators than stages.
        InfeasibleError: no cut fits into the memory of the devices.
    """

    topology: Topology
    microbatch_size: int
    in_flight: tuple[int, ...] | None = ()
    updates: UpdateCost | None = None
    replicas: int | tuple[int, ...] = 1
    num_microbatches: int | None = None
    between_modules: bool = False
    narrow: bool = False

    def __call__(self, graph: TrainingGraph) -> Assignment:
        seconds = operator_seconds(graph, self.microbatch_size, self.updates)
        colocations = find_colocations(graph, self.between_modules)
        num_devices = len(self.topology.devices)
        blocks = operator_blocks(seconds, colocations)
        if self.replicas == 1:
            self._check_enough(graph, blocks[-1] + 1 if blocks else 0, colocations)
        chain = build_operator_chain(graph, blocks, seconds, self.microbatch_size)
        if self.narrow:
            merged = _merged_at_narrowest(chain, 2 * num_devices)
            blocks = [merged[block] for block in blocks]
            chain = build_operator_chain(graph, blocks, seconds, self.microbatch_size)
        if self.updates:
            chain = with_weight_versions(chain, graph, blocks, self.updates, num_devices)
        step = None if self.updates else self.num_microbatches
        in_flight = one_f_one_b if self.in_flight is None else self._in_flight
        most = self.replicas if isinstance(self.replicas, tuple) else min(self.replicas, step or num_devices)
        stages = partition_chain(chain, self.topology, CostModel(in_flight, step), most)
        stage_of = {block: k for k, stage in enumerate(stages) for block in stage.blocks}
        ranks = permuted_ranks(tuple(device for stage in stages for device in stage.devices))
        assigned = Assignment(tuple(stage_of[block] for block in blocks), len(stages), ranks)
        if self.replicas == 1 or isinstance(self.replicas, tuple):
            return assigned
        return replace(assigned, replicas=tuple(stage.replicas for stage in stages))

    def _check_enough(self, graph: TrainingGraph, num_blocks: int, colocations: Sequence[Colocation]) -> None:
        """Raise if colocations leave fewer blocks than devices."""
        num_devices = len(self.topology.devices)
        if colocations and num_blocks < num_devices:
            widest = max(colocations, key=lambda each: each.last - each.first)
            ends = [graph.operators[op] for op in (widest.first, widest.last)]
            where = " to ".join(f"{op.name} of {op.module or 'the model'} ({op.source})" for op in ends)
            raise PlanError(
                f"there are {num_devices} devices, but the model can be cut into {num_blocks} stages at "
                f"most, because {widest.reason}: all operators from {where} are on one stage. "
                f"Use fewer devices, or {widest.remedy}."
            )

    def _in_flight(self, later_devices: int) -> int:
        """The microbatches in flight of a rank that ``later_devices`` follow: not fewer than of any of them.

        The planner requires a number that does not fall as ``later_devices`` grows.
        """
        return max((self.in_flight or ())[-1 - later_devices :], default=0)


def _merged_at_narrowest(chain: OperatorChain, least: int) -> Sequence[int]:
    """The block that each block joins if cuts are made at the ``least`` places where the fewest bytes cross.

    Places that are as narrow, within 1%, are among them.
    """
    crossing = np.zeros(len(chain.names) + 1)
    for transfer in chain.transfers:
        crossing[transfer.first + 1 : transfer.last + 1] += transfer.forward_bytes
    places = crossing[1:-1]
    widest = np.sort(places)[:least][-1:]
    begins = np.append(0, places <= 1.01 * widest if widest.size else places)
    merged: Sequence[int] = np.cumsum(begins).astype(int).tolist()
    return merged
