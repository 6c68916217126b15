"""Whether a model joins its replicas, which then need as many microbatches each."""

from pipec.errors import InputError
from pipec.graph import TrainingGraph, is_collective
from pipec.ir import Placement


def joins_replicas(graph: TrainingGraph) -> bool:
    return any(map(is_collective, graph.nodes))


def check_rounds(graph: TrainingGraph, placement: Placement, num_microbatches: int) -> None:
    """Raise InputError unless the replicas of each stage have as many microbatches."""
    uneven = [ranks for ranks in placement if num_microbatches % len(ranks)]
    if uneven and joins_replicas(graph):
        raise InputError(
            f"the model joins the replicas of a stage, of which each must have as many microbatches, but "
            f"{len(uneven[0])} share {num_microbatches}; pass a multiple of {len(uneven[0])} as microbatches"
        )
