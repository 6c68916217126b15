"""Annealing: better orders from given ones where ranks hold several stages, by shifting chains of tasks.

Where a pattern repeats with every microbatch, moving one task only loses time. Time is gained by moving one
part of the way through the pipeline against the rest. So a move shifts the forwards and input gradients of
such a part in time, for a range of microbatches. Each rank then runs its tasks in the order of their times,
and its weight gradients in the pauses. Moves for the worse are made as well, ever more rarely (Kirkpatrick et
al., Optimization by Simulated Annealing, Science 1983). The random numbers are the same every time, so that
the result is, too.
"""

import math
import random
from collections.abc import Sequence

from pipec.schedules.search.order_timing import OrderTiming, time_orders
from pipec.schedules.search.ordering_problem import OrderingProblem, TaskOrders

_HOT, _COLD = 0.2, 0.02
"""The temperature of the first timing and of the last, in the mean time of a task."""

_SHIFTS = (-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5)
"""How far a move may go, in the mean time of a task. In halves, lest equal tasks coincide."""

_TIE = 1e-9
"""Times closer than this are equal: sums of the same costs in another order."""


def anneal(problem: OrderingProblem, orders: TaskOrders, max_timings: int) -> TaskOrders:
    """The orders of least makespan on a walk of at most ``max_timings`` moves from ``orders``.

    All are within the memory limit and keep the microbatches of a stage in turn. The walk ends early at a
    makespan that no order can beat.
    """
    numbers = random.Random(0)
    unit = sum(problem.seconds) / len(problem.seconds)
    kept = [[task for task in order if task < problem.first_weight_gradient] for order in orders]
    here = time_orders(problem, kept)
    assert here
    best = here
    for number in range(max_timings):
        if best.makespan <= problem.makespan_lower_bound + _TIE:
            break
        temperature = unit * _HOT * (_COLD / _HOT) ** (number / max_timings)
        most = _energy(problem, here) - temperature * math.log(1 - numbers.random())
        times = _shifted(problem, here.start, unit, numbers)
        moved = [sorted(order, key=times.__getitem__) for order in kept]
        found = None if moved == kept else time_orders(problem, moved, most - _mean_end(problem, best) / 2)
        if found and _energy(problem, found) <= most:
            here, kept = found, moved
            best = min(best, here, key=lambda each: (each.makespan, each.sum_of_ends))
    return best.orders


def _energy(problem: OrderingProblem, timeline: OrderTiming) -> float:
    """What is to be small. Of two of the same makespan, one whose tasks end early is easier to improve."""
    return timeline.makespan + _mean_end(problem, timeline) / 2


def _mean_end(problem: OrderingProblem, timeline: OrderTiming) -> float:
    return timeline.sum_of_ends / problem.first_weight_gradient


def _shifted(
    problem: OrderingProblem, start: Sequence[float], unit: float, numbers: random.Random
) -> list[float]:
    """Other times for forwards and input gradients than their ``start``.

    One to three moves each put some microbatches in a row off, or bring them forward: in one place on their
    way through the pipeline, from there on, or up to there.
    """
    times = list(start)
    m, num_stages = problem.num_microbatches, problem.num_stages
    for _ in range(numbers.choice((1, 1, 2, 3))):
        place, first = numbers.randrange(2 * num_stages), numbers.randrange(m)
        end = numbers.choice((m, m, numbers.randint(first + 1, m), first + 1))
        low, high = numbers.choice(((place, place + 1), (place, 2 * num_stages), (0, place + 1)))
        shift = unit * numbers.choice(_SHIFTS)
        for each in range(low, high):
            queue = m * (each if each < num_stages else 3 * num_stages - 1 - each)
            for task in range(queue + first, queue + end):
                times[task] += shift
            times[queue : queue + m] = sorted(times[queue : queue + m])
    return times
