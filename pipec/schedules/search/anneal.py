"""Simulated annealing: improves orders where ranks have several stages, by shifting chains of tasks.

Where a pattern repeats with every microbatch, moving one task only loses time. Shifting a section of the path
through the pipeline against the rest can gain time. So a move shifts the forwards and input gradients of a
section in time, for a range of microbatches. Each rank then runs its tasks in the order of their times, and
its weight gradients in the pauses. Moves for the worse are accepted as well, ever more rarely (Kirkpatrick et
al., Optimization by Simulated Annealing, Science 1983). The random numbers have a fixed seed, so that the
result is always the same.
"""

import math
import random
from collections.abc import Sequence

from pipec.schedules.search.ordering_problem import OrderingProblem, TaskOrders
from pipec.schedules.search.patterns import FollowedPatterns, follow_patterns

_HOT, _COLD = 0.2, 0.02
"""The first and the last temperature, in units of the mean time of a task."""

_SHIFTS = (-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5)
"""The shifts of a move, in units of the mean time of a task; odd halves, lest equal tasks coincide."""

_TIE = 1e-9
"""Times closer than this are equal: sums of the same costs in another order."""


def anneal(problem: OrderingProblem, orders: TaskOrders, max_moves: int) -> TaskOrders:
    """The orders of least makespan on a random walk of at most ``max_moves`` moves from ``orders``.

    All orders are within the memory limit, with the microbatches of a stage in order. The walk ends early at
    the least possible makespan.
    """
    rng = random.Random(0)
    unit = sum(problem.seconds) / len(problem.seconds)
    patterns = [[task for task in order if task < problem.first_weight_gradient] for order in orders]
    best = current = follow_patterns(problem, patterns)
    for number in range(max_moves):
        if current is None or best is None or best.makespan <= problem.makespan_lower_bound + _TIE:
            break
        temperature = unit * _HOT * (_COLD / _HOT) ** (number / max_moves)
        max_energy = _energy(current) - temperature * math.log(1 - rng.random())
        times = _shifted(problem, current.starts, unit, rng)
        moved = [sorted(pattern, key=times.__getitem__) for pattern in patterns]
        if moved == patterns:
            continue
        found = follow_patterns(problem, moved)
        if found and _energy(found) <= max_energy:
            current, patterns = found, moved
            best = min(best, current, key=lambda each: (each.makespan, each.mean_start))
    return best.orders if best else orders


def _energy(found: FollowedPatterns) -> float:
    """The value to minimize. Of equal makespans, the one whose tasks run early is easier to improve."""
    return found.makespan + found.mean_start / 2


def _shifted(
    problem: OrderingProblem, start: Sequence[float], unit: float, rng: random.Random
) -> list[float]:
    """The ``start`` of forwards and input gradients after one to three moves.

    A move delays or advances a range of microbatches: in one place of their path through the pipeline, from
    there on, or up to there.
    """
    times = list(start)
    m, num_stages = problem.num_microbatches, problem.num_stages
    for _ in range(rng.choice((1, 1, 2, 3))):
        place, first = rng.randrange(2 * num_stages), rng.randrange(m)
        end = rng.choice((m, m, rng.randint(first + 1, m), first + 1))
        low, high = rng.choice(((place, place + 1), (place, 2 * num_stages), (0, place + 1)))
        shift = unit * rng.choice(_SHIFTS)
        for each in range(low, high):
            base = m * (each if each < num_stages else 3 * num_stages - 1 - each)
            for task in range(base + first, base + end):
                times[task] += shift
            times[base : base + m] = sorted(times[base : base + m])
    return times
