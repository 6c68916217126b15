"""What a call must be like so that its microbatches together make what the whole batch would."""

from collections.abc import Sequence

from pipec.errors import InputError
from pipec.graph import TrainingGraph, is_collective
from pipec.ir import Placement, Plan


def joins_replicas(graph: TrainingGraph) -> bool:
    """Whether replicas make some values together."""
    return any(map(is_collective, graph.nodes))


def check_rounds(graph: TrainingGraph, placement: Placement, num_microbatches: int) -> None:
    """Raise InputError unless replicas that are joined have as many microbatches."""
    uneven = [ranks for ranks in placement if num_microbatches % len(ranks)]
    if uneven and joins_replicas(graph):
        raise InputError(
            f"the model joins the replicas of a stage, of which each must have as many microbatches, but "
            f"{len(uneven[0])} share {num_microbatches}; pass a multiple of {len(uneven[0])} as microbatches"
        )


def check_outputs(unclear: str, count: int) -> None:
    """Raise InputError if the call that is ``unclear`` makes a result of all rows together."""
    if unclear:
        raise InputError(
            f"the model or loss_fn returns a value of all rows together, which those of {count} microbatches "
            f"do not make: see {unclear}. Return it for each row, or compile with microbatches=1"
        )


def check_sizes(groups: Sequence[Sequence[int]], plans: Sequence[Plan]) -> None:
    """Raise InputError if values of the whole mini-batch are needed where no code can take all of it.

    ``groups`` are the sizes of consecutive microbatches, each run by one of ``plans``.
    """
    if len(groups) > 1 and any(stage.of_batch for stage in plans[0].stages):
        sizes = [size for group in groups for size in group]
        raise InputError(
            f"the loss needs a count over the whole mini-batch, but its {len(sizes)} microbatches of "
            f"{max(sizes)} and {min(sizes)} rows are compiled apart, because the model makes a constant of "
            f"the batch. Pass a batch that {len(sizes)} microbatches divide, as drop_last=True does"
        )
