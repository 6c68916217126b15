"""ZB-1p and ZB-2p: split backwards, searched for given costs and memory (Qi et al., Zero Bubble, ICLR 2024).

The search times the orders of a list scheduler for each of several policies, and then moves single tasks of
the critical path.
"""

from collections.abc import Iterable, Iterator
from itertools import count, product

from pipec.errors import InfeasibleError
from pipec.ir import Schedule
from pipec.schedules.named import zb_h1, zb_h2
from pipec.schedules.order_builder import linear_placement
from pipec.schedules.search.greedy import GreedyPolicy, greedy_orders
from pipec.schedules.search.ordering_problem import (
    OrderingProblem,
    TaskOrders,
    make_ordering_problem,
    time_orders,
)
from pipec.schedules.search.reorder import Score, reorder, score
from pipec.schedules.search.workload import Workload

_PATIENCES = (0.0, 0.5, 1.0)
_EFFORT = 160_000
"""Tasks to time while single ones are moved."""


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

    These are the best of the ``starts`` that fit and of the orders that each policy leads to, reordered.

    Raises:
        InfeasibleError: no order fits within the memory limit.
    """
    fitting = [orders for orders in starts if all(map(problem.fits, count(), orders))]
    greedy = (greedy_orders(problem, policy) for policy in _policies(problem))
    scored = [(_score(problem, orders, by_span), orders) for orders in (*fitting, *filter(None, greedy))]
    if not scored:
        raise InfeasibleError(
            f"no order of {problem.num_stages} stages on {problem.num_ranks} ranks stays within a memory "
            f"limit of {min(problem.memory_limits):g} on each; raise the limit or use smaller microbatches"
        )
    _, orders = min(scored, key=lambda each: each[0])
    return reorder(problem, orders, by_span=by_span, max_timings=_EFFORT // len(problem.producer))


def _score(problem: OrderingProblem, orders: TaskOrders, by_span: bool) -> Score:
    timing = time_orders(problem, orders)
    assert timing
    return score(timing, by_span)


def _policies(problem: OrderingProblem) -> Iterator[GreedyPolicy]:
    """Every patience with the warmup of ZB-H2, with that of 1F1B for as many microbatches as fit, or any."""
    p, m, stages = problem.num_ranks, problem.num_microbatches, range(problem.num_stages)
    held = [max(0.0, problem.memory_growth[stage * m]) for stage in stages]
    most = int(min(m, min(problem.memory_limits) / (max(held) or 1.0)))
    warmups = (
        tuple(min(2 * (p - stage) - 1, m) for stage in stages),
        tuple(max(1, round(most * (1 - stage / len(stages)))) for stage in stages),
        (m,) * len(stages),
    )
    for max_in_flight, patience in product(warmups, _PATIENCES):
        yield GreedyPolicy(patience, max_in_flight)
