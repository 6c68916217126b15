"""Whether microbatches make what the batch would: what is refused if not, and what the user is told."""

import math
from collections.abc import Iterable

from pipec.errors import InputError
from pipec.graph import TrainingGraph, is_collective
from pipec.ir import Placement, Precision


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


def check_offload(
    offload: str | None, recompute: str, memory_limits: Iterable[float], flushes: bool, updates: bool
) -> None:
    """Raise InputError if state or saved values are to wait on the host where they cannot, or need not."""
    if offload in ("optimizer", "all") and not updates:
        raise InputError(
            f"offload is {offload!r}, but the programs have no optimizer; pass optimizer=..., such as "
            "functools.partial(torch.optim.AdamW, lr=1e-3), or offload='activations'"
        )
    if offload not in ("activations", "all"):
        return
    if not flushes:
        raise InputError(
            f"offload is {offload!r}, but without a flush what was saved stays on the device; take a "
            "schedule with a flush, such as schedule='1f1b', or leave it out"
        )
    if recompute == "full":
        raise InputError(
            f"offload is {offload!r}, but recompute='full' saves nothing that could wait on the host; take "
            "recompute='auto', which chooses both together, or 'none'"
        )
    if all(limit == math.inf for limit in memory_limits):
        raise InputError(
            f"offload is {offload!r}, which moves no more than memory asks for; pass the bytes that a device "
            "has, such as memory_limit='16GiB', or a topology that says so"
        )


def check_fast_gradients(precision: Precision | None) -> None:
    """Raise InputError if products are of another type than the sums that they are to be added to."""
    if precision is not None:
        raise InputError(
            f"fast_gradients adds products of weights' own type to sums of that type, but with precision="
            f"{str(precision)!r} products have 16 bits and sums 32; leave out one of the two"
        )


def told_of_rounds(graph: TrainingGraph, replicas: object, num_microbatches: int) -> str:
    """What to tell if the model joins several rounds in a step, and not the whole batch."""
    if not graph.joined or num_microbatches == replicas:
        return ""
    return (
        f"{graph.joined} joins rounds of {replicas} of the {num_microbatches} microbatches, and not the "
        "whole batch; a step is one round without microbatches=..."
    )


def told_of_unclear(graph: TrainingGraph) -> str:
    """What to tell if nothing shows how the losses of microbatches make that of the batch."""
    if not graph.unclear:
        return ""
    return (
        "the losses of microbatches are averaged, each weighted by its rows, but that need not be the loss "
        f"of the batch: see {graph.unclear}. Say how they add up with microbatch_weight=..., or reduce "
        "with sums and means over rows"
    )
