"""A schedule to be searched, in numbers: cells are integers, and an order is a list of them.

Cell ``(kind * num_stages + stage) * m + microbatch`` is a forward (kind 0), an input gradient (1) or a weight
gradient (2). Searches play thousands of candidates, which instructions would make a hundred times slower;
the timeline of ``play`` is that which the simulator gives for the lowered programs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipec.ir import Compute, Phase, Schedule
from pipec.schedules.search.workload import Workload

KINDS = (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
Orders = list[list[int]]
"""The cells of each rank."""


@dataclass(frozen=True)
class Problem:
    """Which cells there are, how long they take, what they read and what they hold.

    ``needs[cell]`` is the cell whose result it reads, or -1, and ``lags[cell]`` how long that is on its way;
    ``holds[cell]`` is what memory grows by when it starts. ``limit`` is of each rank.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    limit: float
    seconds: Sequence[float] = field(repr=False)
    needs: Sequence[int] = field(repr=False)
    lags: Sequence[float] = field(repr=False)
    holds: Sequence[float] = field(repr=False)

    @cached_property
    def awaiting(self) -> list[list[tuple[int, int]]]:
        """The forwards and input gradients that read the result of each cell, with their ranks."""
        awaiting: list[list[tuple[int, int]]] = [[] for _ in self.needs]
        for cell, needed in enumerate(self.needs[: self.first_weight]):
            if needed >= 0:
                awaiting[needed].append((cell, self.placement[self.stage(cell)]))
        return awaiting

    @cached_property
    def work(self) -> list[float]:
        """How long the cells of each rank take."""
        work = [0.0] * self.num_ranks
        for cell, seconds in enumerate(self.seconds):
            work[self.placement[self.stage(cell)]] += seconds
        return work

    @cached_property
    def least_makespan(self) -> float:
        """What no order can beat: each rank does its work once the first microbatch has come to it."""
        m, arrival, arrivals = self.num_microbatches, 0.0, dict[int, float]()
        for stage, rank in enumerate(self.placement):
            arrival += self.lags[stage * m]
            arrivals.setdefault(rank, arrival)
            arrival += self.seconds[stage * m]
        return max(arrivals[rank] + work for rank, work in enumerate(self.work))

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
        return max(self.placement) + 1

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

    def fits(self, order: Iterable[int]) -> bool:
        """Whether a rank stays within the limit."""
        held = 0.0
        for cell in order:
            held += self.holds[cell]
            if held > self.limit:
                return False
        return True


def make_problem(placement: tuple[int, ...], num_microbatches: int, work: Workload, limit: float) -> Problem:
    """``work`` on the stages of ``placement``, with a memory limit for each rank."""
    num_stages, m = len(placement), num_microbatches
    memory = (work.memory_backward, work.memory_weight - work.memory_backward, -work.memory_weight)
    seconds, needs, lags, holds = [], [], [], []
    for kind, phase in enumerate(KINDS):
        for stage, rank in enumerate(placement):
            source, shift = _source(kind, stage, num_stages)
            crosses = source is not None and placement[source] != rank
            seconds += [work.of_stage(phase, placement, stage)] * m
            lags += [work.message if crosses else 0.0] * m
            holds += [memory[kind] / placement.count(rank)] * m
            first = -1 if source is None else (shift * num_stages + source) * m
            needs += [-1] * m if source is None else list(range(first, first + m))
    slack = 1 + 1e-9
    return Problem(placement, m, limit * slack, seconds, needs, lags, holds)


def _source(kind: int, stage: int, num_stages: int) -> tuple[int | None, int]:
    """The stage and kind of what a cell reads; no stage for the first forward."""
    if kind == 0:
        return (stage - 1 if stage else None), 0
    if kind == 2:
        return stage, 1
    return (stage, 0) if stage == num_stages - 1 else (stage + 1, 1)


@dataclass(frozen=True, slots=True)
class Play:
    """When each cell starts and ends, and the makespan and span they make."""

    start: Sequence[float]
    end: Sequence[float]
    makespan: float
    spans: Sequence[float]

    @property
    def span(self) -> float:
        return max(self.spans)


def play(problem: Problem, orders: Orders) -> Play | None:
    """The timeline of ``orders``; None if their cells wait for each other. Linear in the number of cells."""
    needs, lags, seconds = problem.needs, problem.lags, problem.seconds
    start, end = [0.0] * len(needs), [-1.0] * len(needs)
    clock, position = [0.0] * len(orders), [0] * len(orders)
    waiting: dict[int, int] = {}
    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        now, order = clock[rank], orders[rank]
        for number in range(position[rank], len(order)):
            cell = order[number]
            needed = needs[cell]
            if needed >= 0:
                if end[needed] < 0:
                    waiting[needed] = rank
                    position[rank] = number
                    break
                now = max(now, end[needed] + lags[cell])
            start[cell] = now
            now += seconds[cell]
            end[cell] = now
            if cell in waiting:
                runnable.append(waiting.pop(cell))
        clock[rank] = now
    if waiting:
        return None
    spans = [end[order[-1]] - start[order[0]] for order in orders]
    return Play(start, end, max(clock), spans)
