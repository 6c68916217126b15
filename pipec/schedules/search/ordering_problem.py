"""The search for a schedule in numbers: tasks are integers, and an order is a list of tasks.

Task ``(phase_index * num_stages + stage) * m + microbatch`` is a forward (phase_index 0), an input gradient
(1) or a weight gradient (2). A search times many candidates; timing instructions would take a hundred times
as long.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from pipec.ir import Compute, Phase, Placement, Schedule, count_ranks, rank_of
from pipec.ir.columns import Floats, Ints
from pipec.programs.task_times import Deadlock, TaskInputs, run_tasks
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
    results are computed; -1 is for results that stay on their rank. ``memory_growth[task]`` is the
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

    @cached_property
    def columns(self) -> tuple[Floats, Ints, Floats, Ints]:
        """Seconds, producers, times of messages and channels as columns."""
        return (
            np.array(self.seconds),
            np.array(self.producer, np.int32),
            np.array(self.message_times),
            np.array(self.channels, np.int32),
        )

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


@dataclass(frozen=True, slots=True)
class OrderTiming:
    """When each task starts and ends, and when its result reaches its reader.

    ``spans`` are the times of each rank from its first task to its last, and ``sum_of_ends`` is the sum of
    the ends of forwards and input gradients.
    """

    start: Floats
    end: Floats
    arrived: Floats
    makespan: float
    spans: Sequence[float]
    sum_of_ends: float


def time_orders(problem: OrderingProblem, orders: TaskOrders) -> OrderTiming | None:
    """The times of ``orders``, equal to those of the lowered programs; None if tasks wait for each other."""
    seconds, producer, message_times, channels = problem.columns
    order = np.concatenate([np.array(each, np.int32) for each in orders])
    num_tasks = len(order)
    position = np.empty(num_tasks, np.int32)
    position[order] = np.arange(num_tasks)
    sent = np.flatnonzero(message_times[order] > 0)
    sent = sent[np.argsort(channels[order[sent]], kind="stable")]
    carrier = np.arange(num_tasks)
    carrier[sent] = num_tasks + np.arange(len(sent))
    reads = np.flatnonzero(producer[order] >= 0)
    inputs = TaskInputs(
        np.concatenate([reads, carrier[sent]]),
        np.concatenate([carrier[position[producer[order[reads]]]], sent]),
    )
    sizes = [*map(len, orders), *np.bincount(channels[order[sent]], minlength=1).tolist()]
    durations = np.concatenate([seconds[order], message_times[order[sent]]])
    times = run_tasks(durations, inputs, [0, *accumulate(sizes)])
    if isinstance(times, Deadlock):
        return None
    end, firsts = times.ends[position], [0, *accumulate(map(len, orders))]
    return OrderTiming(
        times.starts[position],
        end,
        times.ends[carrier[position]],
        makespan=float(end.max()),
        spans=[float(times.ends[last - 1] - times.starts[first]) for first, last in pairwise(firsts)],
        sum_of_ends=float(end[: problem.first_weight_gradient].sum()),
    )


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
    limits = [limit * ROUNDING_TOLERANCE for limit in memory_limits]
    return OrderingProblem(placement, m, limits, seconds, producer, message_times, channels, memory_growth)


def _producer_and_consumer(phase_index: int, stage: int, num_stages: int) -> tuple[int | None, int | None]:
    """The producer of a task's input, as ``phase_index * num_stages + stage``, and the consumer's stage."""
    last = num_stages - 1
    if phase_index == 0:
        return (stage - 1 if stage else None), min(stage + 1, last)
    if phase_index == 1:
        return (last if stage == last else num_stages + stage + 1), (stage - 1 if stage else None)
    return None, None
