"""ZB-1p and ZB-2p: split backwards, searched for given costs and memory (Qi et al., Zero Bubble, ICLR 2024).

The search times a greedy schedule for each of several policies, then varies the limits of microbatches in
flight. Where ranks have several stages, their interleaving matters as much, so the best orders are annealed.
Last it moves single tasks of the critical path. The search is deterministic.
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
"""Tasks to time while policies vary. Moving tasks, which is cheaper, may time four times as many."""

_ANNEALING = 10 * _EFFORT
"""Tasks that annealing may time. It may time more, because most of its timings end early."""


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


def _zero_bubble(name: str, num_ranks: int, m: int, work: Workload, depth: int) -> Schedule:
    placement = linear_placement(num_ranks)
    per_microbatch = [max(stage.saved, stage.weight_gradient_saved) for stage in work.memory]
    limits = [
        min(depth * one, room)
        for one, room in zip(per_microbatch, work.available_memory(placement), strict=True)
    ]
    for limit, one in zip(limits, per_microbatch, strict=True):
        if limit < one:
            raise InfeasibleError(
                f"schedule {name!r} has a memory limit of {limit:g}, but one microbatch holds {one:g}; "
                "raise the limit or use smaller microbatches"
            )
    problem = make_ordering_problem(placement, m, work, limits)
    starts = [problem.orders(make(num_ranks, m)) for make in (zb_h1, zb_h2)]
    return problem.schedule(name, search(problem, starts, by_span=True))


def search(problem: OrderingProblem, starts: Iterable[TaskOrders], *, by_span: bool) -> TaskOrders:
    """The best orders found, by span and then makespan, or by makespan and then span.

    The search begins with the ``starts`` that fit and with the orders that each policy leads to. It varies
    the best policy, anneals where ranks have several stages, and reorders the best orders.

    Raises:
        InfeasibleError: no order fits within the memory limit.
    """
    fitting = (orders for orders in starts if all(map(problem.fits, count(), orders)))
    candidates = [_scored(problem, orders, by_span) for orders in fitting]
    by_policy = [(_scored_policy(problem, policy, by_span), policy) for policy in _policies(problem)]
    start, policy = min(by_policy, key=lambda each: each[0][0])
    several_stages = problem.num_stages > problem.num_ranks
    max_timings = _EFFORT // len(problem.producer)
    if start[1]:
        num_variations = max_timings // 2 if several_stages else max_timings
        candidates.append(_vary_policies(problem, policy, start, by_span, num_variations))
    if not candidates:
        raise InfeasibleError(
            f"no order of {problem.num_stages} stages on {problem.num_ranks} ranks stays within a memory "
            f"limit of {min(problem.memory_limits):g} on each; raise the limit or use smaller microbatches"
        )
    if several_stages:
        _, orders = min(candidates, key=lambda each: each[0])
        annealed = anneal(problem, orders, max_timings=_ANNEALING // len(problem.producer))
        candidates.append(_scored(problem, annealed, by_span))
    _, orders = min(candidates, key=lambda each: each[0])
    return reorder(problem, orders, by_span=by_span, max_timings=4 * max_timings)


Scored = tuple[Score, TaskOrders]


def _scored(problem: OrderingProblem, orders: TaskOrders, by_span: bool) -> Scored:
    timing = time_orders(problem, orders)
    assert timing
    return score(timing, by_span), orders


def _scored_policy(problem: OrderingProblem, policy: GreedyPolicy, by_span: bool) -> Scored:
    """The orders that a policy leads to; no orders and the worst score if ranks stop for lack of memory."""
    orders = greedy_orders(problem, policy)
    return _scored(problem, orders, by_span) if orders else ((float("inf"),), [])


def _policies(problem: OrderingProblem) -> Iterator[GreedyPolicy]:
    """Every combination of some fills and patiences, with the warmup of ZB-H2 or an unlimited one.

    If there are few tasks, also policies that run forwards first, which are better where memory is short.
    """
    p, m = problem.num_ranks, problem.num_microbatches
    warmups: Sequence[tuple[int, ...]] = (
        tuple(min(2 * (p - stage) - 1, m) for stage in range(problem.num_stages)),
        (m,) * problem.num_stages,
    )
    preferences = (False, True) if len(problem.producer) <= _EFFORT // 10 else (False,)
    for first, max_in_flight, fill, patience in product(preferences, warmups, _FILLS, _PATIENCES):
        yield GreedyPolicy(fill, patience, first, max_in_flight)


def _vary_policies(
    problem: OrderingProblem, policy: GreedyPolicy, start: Scored, by_span: bool, num_variations: int
) -> Scored:
    """The best orders of a random walk from ``policy`` that never goes to a policy with worse orders."""
    rng = random.Random(0)
    best = start
    for _ in range(num_variations):
        varied = _varied_policy(problem, policy, rng)
        other = _scored_policy(problem, varied, by_span)
        if other[0] <= best[0]:
            best, policy = other, varied
    return best


def _varied_policy(problem: OrderingProblem, policy: GreedyPolicy, rng: random.Random) -> GreedyPolicy:
    """The policy with another max_in_flight of one to three stages, and sometimes one other field changed."""
    max_in_flight = list(policy.max_in_flight)
    stages = range(len(max_in_flight))
    for stage in rng.sample(stages, min(rng.choice((1, 1, 2, 3)), len(max_in_flight))):
        near = max_in_flight[stage] + rng.choice((-2, -1, 1, 2))
        far = rng.randint(1, problem.num_microbatches)
        max_in_flight[stage] = min(max(rng.choice((near, far)), 1), problem.num_microbatches)
    varied = replace(policy, max_in_flight=tuple(max_in_flight))
    match rng.randrange(10):
        case 0:
            return replace(varied, fill=rng.choice(_FILLS))
        case 1:
            return replace(varied, patience=rng.choice(_PATIENCES))
        case 2:
            return replace(varied, forward_first=not policy.forward_first)
    return varied
