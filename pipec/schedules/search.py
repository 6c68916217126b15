"""Schedules that are searched for given costs and memory: ZB-1p, ZB-2p and ``auto``.

ZB-1p and ZB-2p (Qi et al., Zero Bubble, ICLR 2024) have one stage a rank, and split backwards. A list
scheduler makes an order for each of a few policies; then single tasks of the critical path are moved while
that helps. Tasks are numbers: ``(phase * p + stage) * m + microbatch``, where the phase is 0 for a forward, 1
for an input gradient and 2 for a weight gradient.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product

import numpy as np

from pipec.errors import InfeasibleError, InputError
from pipec.ir import Compute, Phase, Schedule
from pipec.ir.columns import Floats
from pipec.programs.task_times import Deadlock, TaskInputs, run_tasks
from pipec.schedules.chain_simulation import simulate_schedule
from pipec.schedules.named import SCHEDULES, zb_h1, zb_h2
from pipec.schedules.order_builder import linear_placement
from pipec.schedules.workload import ROUNDING_TOLERANCE, Workload

_PHASES = (Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
_FORWARD, _INPUT, _WEIGHT = range(3)

_PATIENCES = (0.0, 0.5, 1.0)

_EFFORT = 160_000
"""Tasks to time while single ones are moved."""

_STEPS = (1, -1, 2, -2, 3, -3)
"""The number of neighbours that a move passes: later ones, or earlier ones if negative."""

_TIE = 1e-9
"""Times closer than this are equal: sums of the same costs in another order."""

TaskOrders = list[list[int]]
"""The tasks of each rank, in order."""


def zb_1p(num_ranks: int, num_microbatches: int, work: Workload) -> Schedule:
    """One stage per rank, each with memory for p microbatches, or ``work``'s limit if that is lower.

    1F1B's first rank needs as much memory. At unit costs the bubble equals that of ZB-H1; for other costs the
    search fills the gaps that ZB-H1's fixed order leaves.

    Raises:
        InfeasibleError: the limit does not hold one microbatch.
    """
    return _zero_bubble("zb-1p", num_ranks, num_microbatches, work, num_ranks)


def zb_2p(num_ranks: int, num_microbatches: int, work: Workload) -> Schedule:
    """One stage per rank and twice the memory of ZB-1p, which leaves almost no bubble in the span.

    Raises:
        InfeasibleError: the limit does not hold one microbatch.
    """
    return _zero_bubble("zb-2p", num_ranks, num_microbatches, work, 2 * num_ranks)


def auto(num_ranks: int, num_microbatches: int, work: Workload) -> Schedule:
    """The schedule of least simulated makespan within the memory limit: a named one, or ZB-2p.

    Raises:
        InfeasibleError: none fits within the memory limit.
    """
    found = list[Schedule]()
    for make in SCHEDULES.values():
        with suppress(InputError):
            found.append(make(num_ranks, num_microbatches))
    with suppress(InfeasibleError):
        found.append(zb_2p(num_ranks, num_microbatches, work))
    fitting = list(filter(work.fits_memory, found))
    if not fitting:
        limit = min(work.memory_limits(num_ranks))
        raise InfeasibleError(
            f"no schedule of {num_ranks} ranks and {num_microbatches} microbatches stays within a memory "
            f"limit of {limit:g}; raise the limit, use smaller microbatches or recompute"
        )
    best = min(fitting, key=lambda schedule: simulate_schedule(schedule, work)[0].makespan)
    return replace(best, name="auto")


def _zero_bubble(name: str, num_ranks: int, m: int, work: Workload, depth: int) -> Schedule:
    per_microbatch = [max(stage.saved, stage.weight_gradient_saved) for stage in work.memory]
    rooms = work.available_memory(linear_placement(num_ranks))
    limits = [min(depth * one, room) for one, room in zip(per_microbatch, rooms, strict=True)]
    for limit, one in zip(limits, per_microbatch, strict=True):
        if limit < one:
            raise InfeasibleError(
                f"schedule {name!r} has a memory limit of {limit:g}, but one microbatch holds {one:g}; "
                "raise the limit or use smaller microbatches"
            )
    tasks = Tasks.of(work, m, limits)
    fixed = (tasks.orders(make(num_ranks, m)) for make in (zb_h1, zb_h2))
    orders = [each for each in fixed if all(map(tasks.fits, range(num_ranks), each))]
    orders += filter(None, (list_scheduled(tasks, *policy) for policy in _policies(tasks)))
    timed = [(timing.score, each) for each in orders if (timing := time_orders(tasks, each))]
    return tasks.schedule(name, _improved(tasks, min(timed, key=lambda each: each[0])[1]))


def _policies(tasks: "Tasks") -> Iterator[tuple[float, Sequence[int]]]:
    """Every patience with the warmup of ZB-H2, with that of 1F1B for as many microbatches as fit, or any."""
    p, m = tasks.num_ranks, tasks.num_microbatches
    held = max(0.0, *tasks.growth[:p])
    most = int(min(m, min(tasks.memory_limits) / (held or 1.0)))
    warmups = (
        [min(2 * (p - stage) - 1, m) for stage in range(p)],
        [max(1, round(most * (1 - stage / p))) for stage in range(p)],
        [m] * p,
    )
    for in_flight, patience in product(warmups, _PATIENCES):
        yield patience, in_flight


@dataclass(frozen=True)
class Tasks:
    """The computes of p stages, one on each rank, with m microbatches.

    The last five have an entry for each *kind* of task, ``phase * p + stage``: its seconds, those of the
    message with its result, and the ``growth`` of the memory that its rank holds. ``producers`` and
    ``readers`` are added to a task for the one that makes its input, and the one that reads its result; they
    are 0 if there is none. Messages of one kind follow each other.
    """

    num_ranks: int
    num_microbatches: int
    memory_limits: Sequence[float]
    seconds: Sequence[float]
    messages: Sequence[float]
    growth: Sequence[float]
    producers: Sequence[int]
    readers: Sequence[int]

    @classmethod
    def of(cls, work: Workload, num_microbatches: int, memory_limits: Sequence[float]) -> "Tasks":
        p, m, none = work.num_stages, num_microbatches, [0] * work.num_stages
        kinds = [(phase, stage) for phase in _PHASES for stage in range(p)]
        return cls(
            p,
            m,
            [limit * ROUNDING_TOLERANCE for limit in memory_limits],
            [work.seconds(phase, stage) for phase, stage in kinds],
            [*work.messages, 0.0, 0.0, *work.messages, *none],
            [sum(work.memory[stage].growth(phase)) for phase, stage in kinds],
            [0, *[-m] * (p - 1), *[m] * (p - 1), -p * m, *none],
            [*[m] * (p - 1), p * m, 0, *[-m] * (p - 1), *none],
        )

    def orders(self, schedule: Schedule) -> TaskOrders:
        """The orders of a schedule; a whole backward becomes its two halves."""
        numbers = {phase: [k] for k, phase in enumerate(_PHASES)} | {Phase.BACKWARD: [_INPUT, _WEIGHT]}
        return [
            [
                (phase * self.num_ranks + each.stage) * self.num_microbatches + each.microbatch
                for each in order
                for phase in numbers[each.phase]
            ]
            for order in schedule.orders
        ]

    def schedule(self, name: str, orders: TaskOrders) -> Schedule:
        """The orders as a schedule."""

        def compute(task: int) -> Compute:
            kind, microbatch = divmod(task, self.num_microbatches)
            phase, stage = divmod(kind, self.num_ranks)
            return Compute(_PHASES[phase], stage, microbatch)

        computes = tuple(tuple(map(compute, order)) for order in orders)
        return Schedule(name, self.num_microbatches, linear_placement(self.num_ranks), computes)

    def fits(self, rank: int, order: Sequence[int]) -> bool:
        """Whether a rank stays within its memory limit."""
        held = accumulate(self.growth[task // self.num_microbatches] for task in order)
        return max(held, default=0.0) <= self.memory_limits[rank]


def list_scheduled(tasks: Tasks, patience: float, in_flight: Sequence[int]) -> TaskOrders | None:
    """The orders of ranks that choose a task whenever they are free; None if they stop for lack of memory.

    A rank runs an input gradient if one can run, else a forward within its memory limit and ``in_flight``
    microbatches between forward and input gradient, else a weight gradient. Before its first input gradient
    it delays a forward if an input gradient arrives within ``patience`` of the forward's time.
    """
    p, m, never = tasks.num_ranks, tasks.num_microbatches, math.inf
    arrived = [0.0] * m + [never] * (2 * p - 1) * m
    done, sent = [0] * 3 * p, [0.0] * 3 * p
    busy, held = [0.0] * p, [0.0] * p
    orders: TaskOrders = [[] for _ in range(p)]

    def next_arrival(kind: int) -> float:
        return arrived[kind * m + done[kind]] if done[kind] < m else never

    def choose(rank: int, now: float) -> tuple[int, float]:
        """The phase to run now, or -1 and the time at which an input is known to arrive."""
        num_forwards, num_inputs, num_weights = done[rank::p]
        inputs, forwards = next_arrival(p + rank), never
        if inputs <= now:
            return _INPUT, now
        grown = max(tasks.growth[rank], tasks.growth[rank] + tasks.growth[p + rank])
        if num_forwards - num_inputs < in_flight[rank] and held[rank] + grown <= tasks.memory_limits[rank]:
            forwards = next_arrival(rank)
        if forwards <= now:
            if num_inputs or inputs >= now + patience * tasks.seconds[rank]:
                return _FORWARD, now
            forwards = never
        return (_WEIGHT, now) if num_weights < num_inputs else (-1, min(inputs, forwards))

    events = [(0.0, rank) for rank in range(p)]
    while events:
        now, rank = heapq.heappop(events)
        phase, wake = choose(rank, now) if now >= busy[rank] else (-1, never)
        if phase < 0:
            if wake < never:
                heapq.heappush(events, (wake, rank))
            continue
        kind = phase * p + rank
        task = kind * m + done[kind]
        orders[rank].append(task)
        done[kind] += 1
        held[rank] += tasks.growth[kind]
        busy[rank] = now + tasks.seconds[kind]
        heapq.heappush(events, (busy[rank], rank))
        if tasks.readers[kind]:
            reader = task + tasks.readers[kind]
            arrived[reader] = sent[kind] = max(busy[rank], sent[kind]) + tasks.messages[kind]
            heapq.heappush(events, (arrived[reader], reader // m % p))
    return orders if sum(map(len, orders)) == len(done) * m else None


@dataclass(frozen=True, slots=True)
class OrderTiming:
    """When each task starts and ends, and when its result reaches its reader.

    ``spans`` are the times of each rank from its first task to its last. The ``score`` is to be least: the
    longest span, then the makespan, then the sum of the ends of forwards and input gradients. This decides
    where several ranks delay the critical path one after the other, so that no single move shortens it.
    """

    start: Floats
    end: Floats
    arrived: Floats
    spans: Sequence[float]
    makespan: float
    score: tuple[float, float, float]


def time_orders(tasks: Tasks, orders: TaskOrders) -> OrderTiming | None:
    """The times of ``orders``, equal to those of the lowered programs; None if tasks wait for each other."""
    order = np.concatenate([np.array(each, np.int32) for each in orders])
    position, places = np.empty_like(order), np.arange(order.size)
    position[order] = places
    kinds = order // tasks.num_microbatches
    messages, producers = (np.array(each)[kinds] for each in (tasks.messages, tasks.producers))
    sent = np.flatnonzero(messages > 0)
    sent = sent[np.argsort(kinds[sent], kind="stable")]
    carrier, reads = places.copy(), np.flatnonzero(producers)
    carrier[sent] = order.size + np.arange(sent.size)
    inputs = TaskInputs(
        np.concatenate([reads, carrier[sent]]),
        np.concatenate([carrier[position[(order + producers)[reads]]], sent]),
    )
    sizes = [*map(len, orders), *np.bincount(kinds[sent], minlength=1).tolist()]
    durations = np.concatenate([np.array(tasks.seconds)[kinds], messages[sent]])
    times = run_tasks(durations, inputs, [0, *accumulate(sizes)])
    if isinstance(times, Deadlock):
        return None
    end, firsts = times.ends[position], [0, *accumulate(map(len, orders))]
    spans = [float(times.ends[last - 1] - times.starts[first]) for first, last in pairwise(firsts)]
    makespan, gradients = float(end.max()), float(end[: 2 * len(orders) * tasks.num_microbatches].sum())
    score = round(max(spans), 9), round(makespan, 9), round(gradients, 6)
    return OrderTiming(times.starts[position], end, times.ends[carrier[position]], spans, makespan, score)


def _improved(tasks: Tasks, orders: TaskOrders) -> TaskOrders:
    """The best orders that moves find from ``orders`` within the memory limits and the effort."""
    best, left = time_orders(tasks, orders), _EFFORT // (3 * len(orders) * tasks.num_microbatches)
    assert best is not None
    moves = _moves(tasks, orders, best)
    while left > 0 and (candidate := next(moves, None)):
        left -= 1
        timing = time_orders(tasks, candidate)
        if timing and timing.score < best.score:
            orders, best = candidate, timing
            moves = _moves(tasks, orders, best)
    return orders


def _moves(tasks: Tasks, orders: TaskOrders, timing: OrderTiming) -> Iterator[TaskOrders]:
    """Orders within the memory limits with one task of a critical path moved past some neighbours.

    A move passes no task of the same phase or microbatch.
    """
    m = tasks.num_microbatches
    position = {task: (rank, at) for rank, order in enumerate(orders) for at, task in enumerate(order)}
    critical = _critical_tasks(tasks, orders, timing, position)
    for step, task in product(_STEPS, critical):
        rank, at = position[task]
        order, target = [*orders[rank]], at + step
        if not 0 <= target < len(order):
            continue
        order.insert(target, order.pop(at))
        passed = orders[rank][min(at, target) : max(at, target) + 1]
        passed.remove(task)
        if all(each // m != task // m and each % m != task % m for each in passed) and tasks.fits(
            rank, order
        ):
            yield [*orders[:rank], order, *orders[rank + 1 :]]


def _critical_tasks(
    tasks: Tasks, orders: TaskOrders, timing: OrderTiming, position: Mapping[int, tuple[int, int]]
) -> list[int]:
    """The last task of the rank with the longest span, and back to its start all that others follow at once.

    A task follows the previous one of its rank, or the one whose result it reads, or both. Only a change on
    such a path can shorten the span.
    """
    found = [orders[int(np.argmax(timing.spans))][-1]]
    visited = {*found}
    for task in found:
        (rank, at), producer = position[task], tasks.producers[task // tasks.num_microbatches]
        before = [(orders[rank][at - 1], timing.end)] if at else []
        before += [(task + producer, timing.arrived)] if producer else []
        for other, ready in before:
            if ready[other] >= timing.start[task] - _TIE and other not in visited:
                visited.add(other)
                found.append(other)
    return found
