"""Schedules of stages with replicas: any schedule on several pipelines, and 1F1B on unequal numbers."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

from pipec.errors import InputError
from pipec.ir import Compute, Phase, Placement, Schedule
from pipec.ir.columns import ComputeColumns
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
    """1F1B with ``replicas[s]`` ranks for stage s, which take the microbatches in turn.

    It is 1F1B-RR (Narayanan et al., PipeDream, SOSP 2019, section 3.3), with a flush. Ranks are numbered from
    stage to stage. A rank runs a backward as soon as one is ready, else a forward, unless enough microbatches
    are in flight to keep all later ranks busy. A stage with r replicas is assumed to take r units of time for
    a forward and 2r for a backward, so that all stages are equally fast.

    Raises:
        InputError: there are fewer microbatches than replicas of a stage.
    """
    if num_microbatches < max(replicas):
        raise InputError(
            f"a stage has {max(replicas)} replicas, which need a microbatch each, but there are "
            f"{num_microbatches}; pass microbatches={max(replicas)} or more, with as many rows in the batch"
        )
    placement = consecutive_placement(replicas)
    return replace(
        Schedule("1f1b", num_microbatches, placement, ()),
        orders=tuple(map(ComputeColumns.of, _Greedy(placement, num_microbatches).orders())),
    )


def consecutive_placement(replicas: Sequence[int]) -> Placement:
    """``replicas[s]`` ranks for stage s, numbered from stage to stage."""
    firsts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    return tuple(tuple(range(first, first + count)) for first, count in zip(firsts, replicas, strict=True))


class _Greedy:
    """The state of ranks that run any compute as soon as they can."""

    def __init__(self, placement: Placement, num_microbatches: int) -> None:
        self._placement, self._num_microbatches = placement, num_microbatches
        self._stage_of = {rank: stage for stage, ranks in enumerate(placement) for rank in ranks}
        behind = [sum(map(len, placement[stage:])) for stage in range(len(placement))]
        self._room = {
            rank: ceil(behind[stage] / len(placement[stage])) for rank, stage in self._stage_of.items()
        }
        self._ready: dict[int, dict[Phase, list[int]]] = {
            rank: {Phase.FORWARD: [], Phase.BACKWARD: []} for rank in self._stage_of
        }
        self._in_flight = dict.fromkeys(self._stage_of, 0)
        self._busy = dict.fromkeys(self._stage_of, False)

    def orders(self) -> list[list[Compute]]:
        """The computes of each rank, in order."""
        orders: list[list[Compute]] = [[] for _ in self._stage_of]
        ended: list[tuple[int, int, Compute]] = []
        for microbatch in range(self._num_microbatches):
            self._arrive(Phase.FORWARD, 0, microbatch)
        self._start_all(0, orders, ended)
        while ended:
            now = ended[0][0]
            while ended and ended[0][0] == now:
                _, rank, compute = heapq.heappop(ended)
                self._busy[rank] = False
                self._start_next(compute)
            self._start_all(now, orders, ended)
        return orders

    def _start_all(
        self, now: int, orders: list[list[Compute]], ended: list[tuple[int, int, Compute]]
    ) -> None:
        for rank, stage in self._stage_of.items():
            phase = self._next_phase(rank)
            if phase is None:
                continue
            compute = Compute(phase, stage, heapq.heappop(self._ready[rank][phase]))
            self._in_flight[rank] += 1 if phase is Phase.FORWARD else -1
            self._busy[rank] = True
            orders[rank].append(compute)
            units = len(self._placement[stage]) * (1 if phase is Phase.FORWARD else 2)
            heapq.heappush(ended, (now + units, rank, compute))

    def _next_phase(self, rank: int) -> Phase | None:
        if self._busy[rank]:
            return None
        if self._ready[rank][Phase.BACKWARD]:
            return Phase.BACKWARD
        may_start = self._ready[rank][Phase.FORWARD] and self._in_flight[rank] < self._room[rank]
        return Phase.FORWARD if may_start else None

    def _start_next(self, compute: Compute) -> None:
        """Make the next compute of a microbatch ready."""
        last = len(self._placement) - 1
        if compute.phase is Phase.FORWARD and compute.stage < last:
            self._arrive(Phase.FORWARD, compute.stage + 1, compute.microbatch)
        elif compute.phase is Phase.FORWARD:
            self._arrive(Phase.BACKWARD, last, compute.microbatch)
        elif compute.stage > 0:
            self._arrive(Phase.BACKWARD, compute.stage - 1, compute.microbatch)

    def _arrive(self, phase: Phase, stage: int, microbatch: int) -> None:
        ranks = self._placement[stage]
        heapq.heappush(self._ready[ranks[microbatch % len(ranks)]][phase], microbatch)
