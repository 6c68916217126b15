"""A schedule to be searched, in numbers: cells are integers, and an order is a list of them.

Cell ``(kind * num_stages + stage) * m + microbatch`` is a forward (kind 0), an input gradient (1) or a weight
gradient (2). A search plays thousands of candidates; as instructions they would take a hundred times as long.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipec.ir import Compute, Phase, Placement, Schedule, count_ranks, rank_of
from pipec.schedules.search.workload import SLACK, Workload

KINDS = (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
Orders = list[list[int]]
"""The cells of each rank."""


@dataclass(frozen=True)
class Problem:
    """Which cells there are, how long they take, what they read and what they hold.

    ``needs[cell]`` is the cell whose result it reads, or -1; a weight gradient reads nothing, but every order
    has it behind its input gradient. The result of a cell is ``lags[cell]`` on its way to its reader through
    channel ``channels[cell]``, which carries one at a time in the order in which they are made; channel -1
    stands for those in which messages never meet. ``holds[cell]`` is by how much memory grows with a cell,
    ``limits[rank]`` how much may be held.
    """

    placement: Placement
    num_microbatches: int
    limits: Sequence[float]
    seconds: Sequence[float] = field(repr=False)
    needs: Sequence[int] = field(repr=False)
    lags: Sequence[float] = field(repr=False)
    channels: Sequence[int] = field(repr=False)
    holds: Sequence[float] = field(repr=False)

    @cached_property
    def readers(self) -> list[int]:
        """The cell that reads the result of each, or -1."""
        readers = [-1] * len(self.needs)
        for cell, needed in enumerate(self.needs):
            if needed >= 0:
                readers[needed] = cell
        return readers

    @cached_property
    def ranks(self) -> list[int]:
        """The rank of each cell."""
        cells = range(len(self.seconds))
        return [rank_of(self.placement, self.stage(cell), self.microbatch(cell)) for cell in cells]

    @cached_property
    def work(self) -> list[float]:
        """How long the cells of each rank take."""
        work = [0.0] * self.num_ranks
        for rank, seconds in zip(self.ranks, self.seconds, strict=True):
            work[rank] += seconds
        return work

    @cached_property
    def least_makespan(self) -> float:
        """What no order can beat: each rank does its work once the first microbatch has come to it."""
        m, arrival, arrivals = self.num_microbatches, 0.0, dict[int, float]()
        for stage in range(self.num_stages):
            arrivals.setdefault(rank_of(self.placement, stage), arrival)
            arrival += self.seconds[stage * m]
            arrival += self.lags[stage * m]
        return max(arrivals[rank] + work for rank, work in enumerate(self.work))

    @cached_property
    def num_channels(self) -> int:
        return max(self.channels) + 1

    @cached_property
    def first_input(self) -> int:
        """The cells from here on are input gradients."""
        return self.num_stages * self.num_microbatches

    @cached_property
    def first_weight(self) -> int:
        """The cells from here on are weight gradients."""
        return 2 * self.first_input

    @cached_property
    def num_ranks(self) -> int:
        return count_ranks(self.placement)

    @cached_property
    def num_stages(self) -> int:
        return len(self.placement)

    def kind(self, cell: int) -> int:
        return cell // self.first_input

    def stage(self, cell: int) -> int:
        return cell // self.num_microbatches % self.num_stages

    def microbatch(self, cell: int) -> int:
        return cell % self.num_microbatches

    def schedule(self, name: str, orders: Orders) -> Schedule:
        """The orders as a schedule."""
        return Schedule(name, self.num_microbatches, self.placement, tuple(map(self._computes, orders)))

    def orders(self, schedule: Schedule) -> Orders:
        """The orders of a schedule on these stages; a whole backward becomes its two halves."""
        return [[cell for each in order for cell in self._cells(each)] for order in schedule.orders]

    def _cells(self, compute: Compute) -> Iterator[int]:
        halves = KINDS[1:] if compute.phase is Phase.BACKWARD else (compute.phase,)
        for phase in halves:
            kind = KINDS.index(phase)
            yield (kind * self.num_stages + compute.stage) * self.num_microbatches + compute.microbatch

    def _computes(self, order: Iterable[int]) -> tuple[Compute, ...]:
        return tuple(
            Compute(KINDS[self.kind(cell)], self.stage(cell), self.microbatch(cell)) for cell in order
        )

    def fits(self, rank: int, order: Iterable[int]) -> bool:
        """Whether a rank stays within its limit."""
        held, limit = 0.0, self.limits[rank]
        for cell in order:
            held += self.holds[cell]
            if held > limit:
                return False
        return True


def make_problem(
    placement: Placement, num_microbatches: int, work: Workload, limits: Sequence[float]
) -> Problem:
    """``work`` on the stages of ``placement``; ``limits`` is what the microbatches of each rank may hold."""
    num_stages, m, work = len(placement), num_microbatches, work.on(placement)
    seconds, lags, holds = list[float](), list[float](), list[float]()
    needs, channels = list[int](), list[int]()
    numbers = dict[tuple[int, int], int]()
    for kind, phase in enumerate(KINDS):
        for stage in range(num_stages):
            rank = rank_of(placement, stage)
            needed, reader = _ends(kind, stage, num_stages)
            crosses = reader is not None and rank_of(placement, reader) != rank
            seconds += [work.seconds(phase, stage)] * m
            needs += [-1] * m if needed is None else range(needed * m, needed * m + m)
            holds += [sum(work.memory[stage].growth(phase))] * m
            if reader is not None and crosses:
                lags += [work.messages[min(stage, reader)]] * m
                channels += [numbers.setdefault((rank, rank_of(placement, reader)), len(numbers))] * m
            else:
                lags += [0.0] * m
                channels += [-1] * m
    _forget_free_channels(channels, seconds, lags)
    within = [limit * SLACK for limit in limits]
    return Problem(placement, m, within, seconds, needs, lags, channels, holds)


def _forget_free_channels(channels: list[int], seconds: Sequence[float], lags: Sequence[float]) -> None:
    """Leave out the channels that a message has always left before a cell can have made the next one."""
    for channel in range(max(channels) + 1):
        cells = [cell for cell, through in enumerate(channels) if through == channel]
        if max(lags[cell] for cell in cells) <= min(seconds[cell] for cell in cells):
            for cell in cells:
                channels[cell] = -1


def _ends(kind: int, stage: int, num_stages: int) -> tuple[int | None, int | None]:
    """What a cell reads, as a number of kind and stage, and the stage that reads its result."""
    last = num_stages - 1
    if kind == 0:
        return (stage - 1 if stage else None), min(stage + 1, last)
    if kind == 1:
        return (last if stage == last else num_stages + stage + 1), (stage - 1 if stage else None)
    return None, None
