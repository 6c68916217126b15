"""A schedule to be searched, in numbers: tasks are integers, and an order is a list of them.

Task ``(phase_index * num_stages + stage) * m + microbatch`` is a forward (phase_index 0), an input gradient
(1) or a weight gradient (2). A search times thousands of candidates; as instructions they would take a
hundred times as long.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipec.ir import Compute, Phase, Placement, Schedule, count_ranks, rank_of
from pipec.schedules.search.workload import ROUNDING_TOLERANCE, Workload

SPLIT_PHASES = (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
TaskOrders = list[list[int]]
"""The tasks of each rank."""


@dataclass(frozen=True)
class OrderingProblem:
    """Which tasks there are, how long they take, what they read and what they hold.

    ``needs[task]`` is the task whose result it reads, or -1; a weight gradient reads nothing, but every order
    has it behind its input gradient. The result of a task is ``lags[task]`` on its way to its reader through
    channel ``channels[task]``, which carries one at a time in the order in which they are made; channel -1
    stands for those in which messages never wait for each other. ``holds[task]`` is by how much memory grows
    with a task, ``memory_limits[rank]`` how much may be held.
    """

    placement: Placement
    num_microbatches: int
    memory_limits: Sequence[float]
    seconds: Sequence[float] = field(repr=False)
    producer: Sequence[int] = field(repr=False)
    message_times: Sequence[float] = field(repr=False)
    channels: Sequence[int] = field(repr=False)
    memory_growth: Sequence[float] = field(repr=False)

    @cached_property
    def consumer(self) -> list[int]:
        """The task that reads the result of each, or -1."""
        readers = [-1] * len(self.producer)
        for task, needed in enumerate(self.producer):
            if needed >= 0:
                readers[needed] = task
        return readers

    @cached_property
    def ranks(self) -> list[int]:
        """The rank of each task."""
        tasks = range(len(self.seconds))
        return [rank_of(self.placement, self.stage(task), self.microbatch(task)) for task in tasks]

    @cached_property
    def busy_times(self) -> list[float]:
        """How long the tasks of each rank take."""
        work = [0.0] * self.num_ranks
        for rank, seconds in zip(self.ranks, self.seconds, strict=True):
            work[rank] += seconds
        return work

    @cached_property
    def makespan_lower_bound(self) -> float:
        """What no order can beat: each rank does its work once the first microbatch has come to it."""
        m, arrival, arrivals = self.num_microbatches, 0.0, dict[int, float]()
        for stage in range(self.num_stages):
            arrivals.setdefault(rank_of(self.placement, stage), arrival)
            arrival += self.seconds[stage * m]
            arrival += self.message_times[stage * m]
        return max(arrivals[rank] + work for rank, work in enumerate(self.busy_times))

    @cached_property
    def num_channels(self) -> int:
        return max(self.channels) + 1

    @cached_property
    def first_input_gradient(self) -> int:
        """The tasks from here on are input gradients."""
        return self.num_stages * self.num_microbatches

    @cached_property
    def first_weight_gradient(self) -> int:
        """The tasks from here on are weight gradients."""
        return 2 * self.first_input_gradient

    @cached_property
    def num_ranks(self) -> int:
        return count_ranks(self.placement)

    @cached_property
    def num_stages(self) -> int:
        return len(self.placement)

    def phase_index(self, task: int) -> int:
        return task // self.first_input_gradient

    def stage(self, task: int) -> int:
        return task // self.num_microbatches % self.num_stages

    def microbatch(self, task: int) -> int:
        return task % self.num_microbatches

    def schedule(self, name: str, orders: TaskOrders) -> Schedule:
        """The orders as a schedule."""
        return Schedule(name, self.num_microbatches, self.placement, tuple(map(self._computes, orders)))

    def orders(self, schedule: Schedule) -> TaskOrders:
        """The orders of a schedule on these stages; a whole backward becomes its two halves."""
        return [[task for each in order for task in self._cells(each)] for order in schedule.orders]

    def _cells(self, compute: Compute) -> Iterator[int]:
        halves = SPLIT_PHASES[1:] if compute.phase is Phase.BACKWARD else (compute.phase,)
        for phase in halves:
            phase_index = SPLIT_PHASES.index(phase)
            yield (phase_index * self.num_stages + compute.stage) * self.num_microbatches + compute.microbatch

    def _computes(self, order: Iterable[int]) -> tuple[Compute, ...]:
        return tuple(
            Compute(SPLIT_PHASES[self.phase_index(task)], self.stage(task), self.microbatch(task))
            for task in order
        )

    def fits(self, rank: int, order: Iterable[int]) -> bool:
        """Whether a rank stays within its limit."""
        held, limit = 0.0, self.memory_limits[rank]
        for task in order:
            held += self.memory_growth[task]
            if held > limit:
                return False
        return True


def make_ordering_problem(
    placement: Placement, num_microbatches: int, work: Workload, memory_limits: Sequence[float]
) -> OrderingProblem:
    """``work`` on the stages of ``placement``; ``memory_limits`` is what each rank may hold."""
    num_stages, m, work = len(placement), num_microbatches, work.for_placement(placement)
    seconds, lags, holds = list[float](), list[float](), list[float]()
    needs, channels = list[int](), list[int]()
    numbers = dict[tuple[int, int], int]()
    for phase_index, phase in enumerate(SPLIT_PHASES):
        for stage in range(num_stages):
            rank = rank_of(placement, stage)
            needed, reader = _ends(phase_index, stage, num_stages)
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
    within = [limit * ROUNDING_TOLERANCE for limit in memory_limits]
    return OrderingProblem(placement, m, within, seconds, needs, lags, channels, holds)


def _forget_free_channels(channels: list[int], seconds: Sequence[float], lags: Sequence[float]) -> None:
    """Leave out the channels that a message has always left before a task can have made the next one."""
    for channel in range(max(channels) + 1):
        tasks = [task for task, through in enumerate(channels) if through == channel]
        if max(lags[task] for task in tasks) <= min(seconds[task] for task in tasks):
            for task in tasks:
                channels[task] = -1


def _ends(phase_index: int, stage: int, num_stages: int) -> tuple[int | None, int | None]:
    """What a task reads, as a number of phase_index and stage, and the stage that reads its result."""
    last = num_stages - 1
    if phase_index == 0:
        return (stage - 1 if stage else None), min(stage + 1, last)
    if phase_index == 1:
        return (last if stage == last else num_stages + stage + 1), (stage - 1 if stage else None)
    return None, None
