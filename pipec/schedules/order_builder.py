"""Helpers to write schedules: placements, and the order of a rank that runs a pattern."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import overload

import numpy as np

from pipec.ir import Compute, Phase, Placement, Schedule, count_ranks, one_rank_per_stage
from pipec.ir.columns import PHASE_CODE, ComputeColumns, Ints

Pattern = Sequence[tuple[int, str]]
"""How many times a rank runs which cells, such as ``(3, "F0 I1 W1")``."""

PHASES = {
    "F": Phase.FORWARD,
    "B": Phase.BACKWARD,
    "I": Phase.BACKWARD_INPUT,
    "W": Phase.BACKWARD_WEIGHT,
}


def linear_placement(num_ranks: int) -> Placement:
    """Stage s on rank s."""
    return one_rank_per_stage(range(num_ranks))


def loop_placement(num_ranks: int, num_chunks: int) -> Placement:
    """Stage k on rank k mod p: rank s holds stages s, s + p, s + 2p, ..."""
    return linear_placement(num_ranks) * num_chunks


def v_placement(num_ranks: int) -> Placement:
    """Down and up again: rank s holds stages s and 2p-1-s, rank 0 thus the first and the last."""
    return one_rank_per_stage((*range(num_ranks), *reversed(range(num_ranks))))


def remap_ranks(schedule: Schedule, ranks: Sequence[int]) -> Schedule:
    """The same schedule, with ``ranks[k]`` in the place of rank k."""
    orders = dict(zip(ranks, schedule.orders, strict=True))
    return replace(
        schedule,
        placement=tuple(tuple(ranks[rank] for rank in replicas) for replicas in schedule.placement),
        orders=tuple(orders[rank] for rank in range(len(ranks))),
    )


def looped_name(name: str, num_chunks: int) -> str:
    """``name`` with the number of stages on a rank, which is left out if it is 2."""
    return name if num_chunks == 2 else f"{name}-v{num_chunks}"


def schedule_from_orders(
    name: str,
    num_microbatches: int,
    placement: Placement,
    order: Callable[[int], Iterable[Compute]],
) -> Schedule:
    """The schedule whose rank s runs ``order(s)``."""

    def computes(rank: int) -> ComputeColumns:
        found = order(rank)
        return found if isinstance(found, ComputeColumns) else ComputeColumns.of(tuple(found))

    return Schedule(name, num_microbatches, placement, LazyOrders(count_ranks(placement), computes))


class LazyOrders(Sequence[ComputeColumns]):
    """The orders of ``num_ranks`` ranks, each of them made by ``order(rank)`` when it is first read.

    The name and the placement of a schedule are often read without its orders.
    """

    def __init__(self, num_ranks: int, order: Callable[[int], ComputeColumns]) -> None:
        self._num_ranks, self._order = num_ranks, order
        self._orders: dict[int, ComputeColumns] = {}

    def __len__(self) -> int:
        return self._num_ranks

    @overload
    def __getitem__(self, index: int) -> ComputeColumns: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ComputeColumns]: ...
    def __getitem__(self, index: int | slice) -> ComputeColumns | Sequence[ComputeColumns]:
        if isinstance(index, slice):
            return [self[rank] for rank in range(*index.indices(self._num_ranks))]
        rank = range(self._num_ranks)[index]
        if rank not in self._orders:
            self._orders[rank] = self._order(rank)
        return self._orders[rank]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def pattern_order(stages: Sequence[int], num_microbatches: int, pattern: Pattern) -> ComputeColumns:
    """The order of a rank with these ``stages`` that runs a pattern.

    Each phase of a stage takes its next microbatch. It is left out once it has none, so patterns may be
    repeated beyond the end.
    """
    parts, done = list[Ints](), Counter[str]()
    for times, text in pattern:
        cells, times = text.split(), max(times, 0)
        part, places, steps = np.empty((3, times, len(cells)), np.int32), Counter[str](), Counter(cells)
        for column, cell in enumerate(cells):
            part[0, :, column] = PHASE_CODE[PHASES[cell[0]]]
            part[1, :, column] = stages[int(cell[1:] or 0)]
            part[2, :, column] = done[cell] + places[cell] + steps[cell] * np.arange(times)
            places[cell] += 1
        for cell, step in steps.items():
            done[cell] = min(done[cell] + step * times, num_microbatches)
        computes = part.reshape(3, -1)
        parts.append(computes[:, computes[2] < num_microbatches])
    return ComputeColumns(np.concatenate(parts, axis=1))
