"""Annealing: better orders from given ones where ranks hold several stages, by shifting chains of cells.

Where a pattern repeats with every microbatch, moving one cell only loses time; what gains some is to move
one part of the way through the pipeline against the rest. So a move shifts in time the forwards and input
gradients of such a part, for a range of microbatches; then each rank runs its cells in the order of their
times, and its weight gradients in the pauses. Moves for the worse are made as well, ever more rarely
(Kirkpatrick et al., Optimization by Simulated Annealing, Science 1983). The same random numbers every time
make it deterministic.
"""

import math
import random
from collections.abc import Sequence

from pipec.schedules.search.play import Play, play
from pipec.schedules.search.problem import Orders, Problem

_HOT, _COLD = 0.2, 0.02
"""The temperature of the first play and of the last, in the mean time of a cell."""

_SHIFTS = (-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5)
"""How far a move may go, in the mean time of a cell. In halves, so that cells of equal length do not meet."""

_TIE = 1e-9
"""Times closer than this are equal: sums of the same costs in another order."""


def anneal(problem: Problem, orders: Orders, plays: int) -> Orders:
    """The orders of least makespan on a walk of at most ``plays`` moves from ``orders``.

    All are within the memory limit and keep the microbatches of a stage in turn. The walk ends early at a
    makespan that no order can beat.
    """
    numbers = random.Random(0)
    unit = sum(problem.seconds) / len(problem.seconds)
    kept = [[cell for cell in order if cell < problem.first_weight] for order in orders]
    here = play(problem, kept)
    assert here
    best = here
    for number in range(plays):
        if best.makespan <= problem.least_makespan + _TIE:
            break
        temperature = unit * _HOT * (_COLD / _HOT) ** (number / plays)
        most = _energy(problem, here) - temperature * math.log(1 - numbers.random())
        times = _shifted(problem, here.start, unit, numbers)
        moved = [sorted(order, key=times.__getitem__) for order in kept]
        found = None if moved == kept else play(problem, moved, most - _mean_end(problem, best) / 2)
        if found and _energy(problem, found) <= most:
            here, kept = found, moved
            best = min(best, here, key=lambda each: (each.makespan, each.sum_of_ends))
    return best.orders


def _energy(problem: Problem, timeline: Play) -> float:
    """What is to be small. Of two of the same makespan, one whose cells end early is easier to improve."""
    return timeline.makespan + _mean_end(problem, timeline) / 2


def _mean_end(problem: Problem, timeline: Play) -> float:
    return timeline.sum_of_ends / problem.first_weight


def _shifted(problem: Problem, start: Sequence[float], unit: float, numbers: random.Random) -> list[float]:
    """Other times for forwards and input gradients than their ``start``.

    One to three times over, some microbatches in a row are put off or brought forward in one place on their
    way through the pipeline, or from there on, or up to there.
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
            for cell in range(queue + first, queue + end):
                times[cell] += shift
            times[queue : queue + m] = sorted(times[queue : queue + m])
    return times
