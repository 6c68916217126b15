"""The search for a schedule in numbers: tasks are integers, and an order is a list of tasks.

Task ``(phase_index * num_stages + stage) * m + microbatch`` is a forward (phase_index 0), an input gradient
(1) or a weight gradient (2). A search times thousands of candidates; timing instructions would take a hundred
times as long.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipec.ir import Compute, Phase, Placement, Schedule, count_ranks, rank_of
from pipec.schedules.search.workload import ROUNDING_TOLERANCE, Workload

SPLIT_PHASES = (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
TaskOrders = list[list[int]]
"""The tasks of each rank, in order."""


@dataclass(frozen=True)
class OrderingProblem:
    """The tasks: how long they take, which results they read, and how much memory they hold.

    ``producer[task]`` is the task whose result ``task`` reads, or -1. A weight gradient reads no result, but
    every order has it after its input gradient. The result of a task takes ``message_times[task]`` to its
    reader, through channel ``channels[task]``. A channel carries one message at a time, in the order in which
    results are computed; -1 is for messages that never wait for each other. ``memory_growth[task]`` is the
    memory that a rank holds after a task less the memory before it, and ``memory_limits[rank]`` its limit.
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
        """The task that reads the result of each task, or -1."""
        consumers = [-1] * len(self.producer)
        for task, source in enumerate(self.producer):
            if source >= 0:
                consumers[source] = task
        return consumers

    @cached_property
    def ranks(self) -> list[int]:
        """The rank of each task."""
        tasks = range(len(self.seconds))
        return [rank_of(self.placement, self.stage(task), self.microbatch(task)) for task in tasks]

    @cached_property
    def busy_times(self) -> list[float]:
        """The time that the tasks of each rank take together."""
        busy = [0.0] * self.num_ranks
        for rank, seconds in zip(self.ranks, self.seconds, strict=True):
            busy[rank] += seconds
        return busy

    @cached_property
    def makespan_lower_bound(self) -> float:
        """A makespan that no order can beat: a rank runs all its tasks after the first microbatch arrives."""
        m, arrival, arrivals = self.num_microbatches, 0.0, dict[int, float]()
        for stage in range(self.num_stages):
            arrivals.setdefault(rank_of(self.placement, stage), arrival)
            arrival += self.seconds[stage * m]
            arrival += self.message_times[stage * m]
        return max(arrivals[rank] + busy for rank, busy in enumerate(self.busy_times))

    @cached_property
    def num_channels(self) -> int:
        return max(self.channels) + 1

    @cached_property
    def first_input_gradient(self) -> int:
        """The first task that is an input gradient."""
        return self.num_stages * self.num_microbatches

    @cached_property
    def first_weight_gradient(self) -> int:
        """The first task that is a weight gradient."""
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
        """The orders of a schedule on this placement; a whole backward becomes its two halves."""
        return [[task for each in order for task in self._tasks(each)] for order in schedule.orders]

    def _tasks(self, compute: Compute) -> Iterator[int]:
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
        """Whether a rank stays within its memory limit."""
        held, limit = 0.0, self.memory_limits[rank]
        for task in order:
            held += self.memory_growth[task]
            if held > limit:
                return False
        return True


def make_ordering_problem(
    placement: Placement, num_microbatches: int, work: Workload, memory_limits: Sequence[float]
) -> OrderingProblem:
    """The problem of ordering ``work`` on ``placement`` within the memory limit of each rank."""
    num_stages, m, work = len(placement), num_microbatches, work.for_placement(placement)
    seconds, message_times, memory_growth = list[float](), list[float](), list[float]()
    producer, channels = list[int](), list[int]()
    numbers = dict[tuple[int, int], int]()
    for phase_index, phase in enumerate(SPLIT_PHASES):
        for stage in range(num_stages):
            rank = rank_of(placement, stage)
            source, consumer = _producer_and_consumer(phase_index, stage, num_stages)
            seconds += [work.seconds(phase, stage)] * m
            producer += [-1] * m if source is None else range(source * m, source * m + m)
            memory_growth += [sum(work.memory[stage].growth(phase))] * m
            if consumer is not None and rank_of(placement, consumer) != rank:
                message_times += [work.messages[min(stage, consumer)]] * m
                channels += [numbers.setdefault((rank, rank_of(placement, consumer)), len(numbers))] * m
            else:
                message_times += [0.0] * m
                channels += [-1] * m
    _remove_free_channels(channels, seconds, message_times)
    limits = [limit * ROUNDING_TOLERANCE for limit in memory_limits]
    return OrderingProblem(placement, m, limits, seconds, producer, message_times, channels, memory_growth)


def _remove_free_channels(
    channels: list[int], seconds: Sequence[float], message_times: Sequence[float]
) -> None:
    """Remove channels in which no message can wait: each is delivered before a task has made the next one."""
    for channel in range(max(channels) + 1):
        tasks = [task for task, through in enumerate(channels) if through == channel]
        if max(message_times[task] for task in tasks) <= min(seconds[task] for task in tasks):
            for task in tasks:
                channels[task] = -1


def _producer_and_consumer(phase_index: int, stage: int, num_stages: int) -> tuple[int | None, int | None]:
    """The producer of a task's input, as ``phase_index * num_stages + stage``, and the consumer's stage."""
    last = num_stages - 1
    if phase_index == 0:
        return (stage - 1 if stage else None), min(stage + 1, last)
    if phase_index == 1:
        return (last if stage == last else num_stages + stage + 1), (stage - 1 if stage else None)
    return None, None
