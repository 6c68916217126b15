"""ZB-1p and ZB-2p: split backwards, searched for given costs and memory (Qi et al., Zero Bubble, ICLR 2024).

The search times a greedy schedule under a number of policies, then varies how many microbatches each stage
may have in flight. Where ranks hold several stages, how these interleave decides as much, and the best orders
are annealed. Last it moves single tasks of the critical path. All of it is deterministic.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, product

from pipec.errors import InfeasibleError
from pipec.ir import Schedule
from pipec.schedules.order_builder import linear_placement
from pipec.schedules.search.anneal import anneal
from pipec.schedules.search.greedy import GreedyPolicy, greedy_orders
from pipec.schedules.search.order_timing import time_orders
from pipec.schedules.search.ordering_problem import OrderingProblem, TaskOrders, make_ordering_problem
from pipec.schedules.search.reorder import Score, reorder, score
from pipec.schedules.search.workload import Workload
from pipec.schedules.zb_h1 import zb_h1
from pipec.schedules.zb_h2 import zb_h2

_FILLS = (0.0, 0.75)
_PATIENCES = (0.0, 0.5, 1.0)
_EFFORT = 40_000
"""Tasks timed while varying, and four times as many, which are cheaper, while moving tasks."""

_ANNEALING = 10 * _EFFORT
"""Tasks that annealing may time: most timings are given up long before their last task."""


def zb_1p(num_ranks: int, num_microbatches: int, work: Workload) -> Schedule:
    """One stage per rank, and on each the memory of p microbatches, or ``work``'s limit if that is lower.

    That is the memory of 1F1B's first rank. At unit costs the bubble is that of ZB-H1; for other costs the
    search fills the gaps that ZB-H1's fixed order leaves.

    Raises:
        InfeasibleError: the limit does not hold one microbatch.
    """
    return _zero_bubble("zb-1p", num_ranks, num_microbatches, work, num_ranks)


def zb_2p(num_ranks: int, num_microbatches: int, work: Workload) -> Schedule:
    """One stage per rank and twice the memory of ZB-1p, which leaves next to no bubble in the span.

    Raises:
        InfeasibleError: the limit does not hold one microbatch.
    """
    return _zero_bubble("zb-2p", num_ranks, num_microbatches, work, 2 * num_ranks)


def _zero_bubble(name: str, num_ranks: int, m: int, work: Workload, depth: int) -> Schedule:
    placement = linear_placement(num_ranks)
    each = [max(stage.saved, stage.weight_gradient_saved) for stage in work.memory]
    limits = [
        min(depth * one, room) for one, room in zip(each, work.available_memory(placement), strict=True)
    ]
    for limit, one in zip(limits, each, strict=True):
        if limit < one:
            raise InfeasibleError(
                f"schedule {name!r} has a memory limit of {limit:g}, but one microbatch holds {one:g}; "
                "raise the limit or use smaller microbatches"
            )
    problem = make_ordering_problem(placement, m, work, limits)
    known = [problem.orders(make(num_ranks, m)) for make in (zb_h1, zb_h2)]
    return problem.schedule(name, search(problem, known, by_span=True))


def search(problem: OrderingProblem, known: Iterable[TaskOrders], *, by_span: bool) -> TaskOrders:
    """The best orders found: the shortest span counts first, then the makespan, or the other way round.

    The search starts from those ``known`` that fit and from those that every policy leads to. It varies the
    best policy, anneals where ranks have several stages, and reorders the best of all.

    Raises:
        InfeasibleError: none fits within the memory limit.
    """
    fitting = (orders for orders in known if all(map(problem.fits, count(), orders)))
    found = [_scored(problem, orders, by_span) for orders in fitting]
    tried = [(_tried(problem, policy, by_span), policy) for policy in _policies(problem)]
    start, policy = min(tried, key=lambda each: each[0][0])
    several_stages = problem.num_stages > problem.num_ranks
    max_timings = _EFFORT // len(problem.producer)
    if start[1]:
        found.append(
            _varied(problem, policy, start, by_span, max_timings // 2 if several_stages else max_timings)
        )
    if not found:
        raise InfeasibleError(
            f"no order of {problem.num_stages} stages on {problem.num_ranks} ranks stays within a memory "
            f"limit of {min(problem.memory_limits):g} on each; raise the limit or use smaller microbatches"
        )
    if several_stages:
        _, orders = min(found, key=lambda each: each[0])
        annealed = anneal(problem, orders, max_timings=_ANNEALING // len(problem.producer))
        found.append(_scored(problem, annealed, by_span))
    _, orders = min(found, key=lambda each: each[0])
    return reorder(problem, orders, by_span=by_span, max_timings=4 * max_timings)


Scored = tuple[Score, TaskOrders]


def _scored(problem: OrderingProblem, orders: TaskOrders, by_span: bool) -> Scored:
    timeline = time_orders(problem, orders)
    assert timeline
    return score(timeline, by_span), orders


def _tried(problem: OrderingProblem, policy: GreedyPolicy, by_span: bool) -> Scored:
    """The orders that a policy leads to. If ranks come to a halt, no orders and the worst of scores."""
    orders = greedy_orders(problem, policy)
    return _scored(problem, orders, by_span) if orders else ((float("inf"),), [])


def _policies(problem: OrderingProblem) -> Iterator[GreedyPolicy]:
    """Every combination of a few fills and patiences, with the warmup of ZB-H2 or any.

    Where there are few tasks, policies that run forwards first are tried, too: they pay if memory is short.
    """
    p, m = problem.num_ranks, problem.num_microbatches
    warmups: Sequence[tuple[int, ...]] = (
        tuple(min(2 * (p - stage) - 1, m) for stage in range(problem.num_stages)),
        (m,) * problem.num_stages,
    )
    preferences = (False, True) if len(problem.producer) <= _EFFORT // 10 else (False,)
    for first, max_in_flight, fill, patience in product(preferences, warmups, _FILLS, _PATIENCES):
        yield GreedyPolicy(fill, patience, first, max_in_flight)


def _varied(
    problem: OrderingProblem, policy: GreedyPolicy, start: Scored, by_span: bool, max_timings: int
) -> Scored:
    """The best orders found on a walk from ``policy`` that never goes to a policy of worse orders."""
    numbers = random.Random(0)
    best = start
    for _ in range(max_timings):
        varied = _vary(problem, policy, numbers)
        other = _tried(problem, varied, by_span)
        if other[0] <= best[0]:
            best, policy = other, varied
    return best


def _vary(problem: OrderingProblem, policy: GreedyPolicy, numbers: random.Random) -> GreedyPolicy:
    """Other max_in_flight for one to three stages, and now and then another fill, patience or preference."""
    max_in_flight = list(policy.max_in_flight)
    stages = range(len(max_in_flight))
    for stage in numbers.sample(stages, min(numbers.choice((1, 1, 2, 3)), len(max_in_flight))):
        near = max_in_flight[stage] + numbers.choice((-2, -1, 1, 2))
        far = numbers.randint(1, problem.num_microbatches)
        max_in_flight[stage] = min(max(numbers.choice((near, far)), 1), problem.num_microbatches)
    varied = replace(policy, max_in_flight=tuple(max_in_flight))
    match numbers.randrange(10):
        case 0:
            return replace(varied, fill=numbers.choice(_FILLS))
        case 1:
            return replace(varied, patience=numbers.choice(_PATIENCES))
        case 2:
            return replace(varied, forward_first=not policy.forward_first)
    return varied
