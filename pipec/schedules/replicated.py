"""Schedules of stages with replicas: any schedule on several pipelines, and 1F1B on unequal numbers."""

from collections.abc import Callable, Iterator, Sequence

from pipec.errors import InputError
from pipec.ir import Compute, Phase, Placement, Schedule
from pipec.ir.columns import ComputeColumns
from pipec.ir.stream import window
from pipec.schedules.order_builder import LazyOrders


def replicate_schedule(make: Callable[[int], Schedule], num_microbatches: int, replicas: int) -> Schedule:
    """Parallel pipelines that take the microbatches in turn, each with a schedule of its own microbatches.

    ``make`` returns the schedule of one pipeline for a number of microbatches. With two replicas,
    microbatches 0 2 4 ... go through the first pipeline and 1 3 5 ... through the second; rank q of a
    pipeline becomes ranks 2q and 2q + 1, so that the replicas of a stage are adjacent.

    Raises:
        InputError: there are fewer microbatches than replicas, or ``make`` cannot do with so many.
    """
    if num_microbatches < replicas:
        raise InputError(
            f"{replicas} replicas need a microbatch each, but there are {num_microbatches}; pass "
            f"microbatches={replicas} or more, with as many rows in the batch"
        )
    counts = [len(range(k, num_microbatches, replicas)) for k in range(replicas)]
    pipelines = {count: make(count) for count in set(counts)}
    one = pipelines[counts[0]]

    def order(rank: int) -> ComputeColumns:
        position, k = divmod(rank, replicas)
        return _taking_turns(ComputeColumns.of(pipelines[counts[k]].orders[position]), k, replicas)

    orders = LazyOrders(one.num_ranks * replicas, order)
    return Schedule(one.name, num_microbatches, replicate_placement(one.placement, replicas), orders)


def replicate_placement(placement: Placement, replicas: int) -> Placement:
    """``placement`` with r replicas of each rank: rank q becomes qr, qr + 1, ..., qr + r - 1."""
    return tuple(tuple(rank * replicas + k for rank in ranks for k in range(replicas)) for ranks in placement)


def _taking_turns(computes: ComputeColumns, first: int, replicas: int) -> ComputeColumns:
    """The computes with microbatches ``first``, ``first + replicas``, ... in place of 0, 1, ..."""
    matrix = computes.matrix
    matrix[2] = matrix[2] * replicas + first
    return ComputeColumns(matrix)


def adjacent_replicas(num_ranks: int, replicas: int) -> Placement:
    """The ranks that replace each rank of a pipeline, adjacent to each other: (0, 1), (2, 3) and (4, 5)."""
    return consecutive_placement([replicas] * num_ranks)


def adjacent_pipelines(num_ranks: int, replicas: int) -> Placement:
    """The ranks that replace each rank of a pipeline, if the ranks of each pipeline are adjacent.

    For two pipelines of three ranks these are (0, 3), (1, 4) and (2, 5).
    """
    return tuple(tuple(range(rank, num_ranks * replicas, num_ranks)) for rank in range(num_ranks))


def round_robin(num_microbatches: int, replicas: Sequence[int]) -> Schedule:
    """1F1B with ``replicas[s]`` ranks for stage s, which take the microbatches in turn, with a flush.

    Raises:
        InputError: there are fewer microbatches than replicas of a stage.
    """
    if num_microbatches < max(replicas):
        raise InputError(
            f"a stage has {max(replicas)} replicas, which need a microbatch each, but there are "
            f"{num_microbatches}; pass microbatches={max(replicas)} or more, with as many rows in the batch"
        )
    return one_f_one_b_in_turns("1f1b", replicas, num_microbatches)


def one_f_one_b_in_turns(name: str, replicas: Sequence[int], num_microbatches: int) -> Schedule:
    """1F1B-RR (Narayanan et al., PipeDream, SOSP 2019, section 3.3), without a flush or with one at the end.

    The ranks of a stage take the microbatches in turn. Each has a ``window`` of them in flight, with which no
    rank idles in the steady state if a stage with r replicas takes r units of time for a microbatch.
    """
    placement = consecutive_placement(replicas)
    orders = (
        _one_f_one_b(stage, range(first, num_microbatches, len(ranks)), window(stage, replicas))
        for stage, ranks in enumerate(placement)
        for first in range(len(ranks))
    )
    return Schedule(name, num_microbatches, placement, tuple(ComputeColumns.of([*order]) for order in orders))


def _one_f_one_b(stage: int, microbatches: Sequence[int], max_in_flight: int) -> Iterator[Compute]:
    """The computes of a rank: forwards up to ``max_in_flight`` microbatches in flight, then alternating."""
    for number, microbatch in enumerate(microbatches):
        yield Compute(Phase.FORWARD, stage, microbatch)
        if number >= max_in_flight - 1:
            yield Compute(Phase.BACKWARD, stage, microbatches[number - max_in_flight + 1])
    for microbatch in microbatches[max(len(microbatches) - max_in_flight + 1, 0) :]:
        yield Compute(Phase.BACKWARD, stage, microbatch)


def consecutive_placement(replicas: Sequence[int]) -> Placement:
    """``replicas[s]`` ranks for stage s, numbered from stage to stage."""
    firsts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    return tuple(tuple(range(first, first + count)) for first, count in zip(firsts, replicas, strict=True))
