"""ZB-1p and ZB-2p: split backwards, searched for given costs and memory (Qi et al., Zero Bubble, ICLR 2024).

The search plays a greedy schedule under a number of policies, then varies how many microbatches each stage may
have in flight, then moves single cells of the critical path. All of it is deterministic.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from pipec.errors import InfeasibleError
from pipec.ir import Schedule
from pipec.schedules.greedy import Policy, greedy
from pipec.schedules.orders import straight_placement
from pipec.schedules.reorder import Score, reorder, score
from pipec.schedules.search_problem import Orders, Problem, make_problem, play
from pipec.schedules.workload import Workload

_FILLS = (0.0, 0.75)
_PATIENCES = (0.0, 0.5, 1.0)
_EXTRA_WARMUPS = (0, None)
_EFFORT = 60_000
"""Cells played while varying, and four times as many, which are cheaper, while moving cells: under a second for both on one core."""


def zb_1p(num_ranks: int, num_microbatches: int, work: Workload | None = None) -> Schedule:
    """One stage per rank and the memory of 1F1B's first rank: p microbatches, or ``work``'s limit if lower.

    At unit costs its bubble is that of ZB-H1; for other costs it fills the gaps that ZB-H1's fixed order
    leaves.

    Raises:
        InfeasibleError: the limit does not hold one microbatch.
    """
    return _zero_bubble("zb-1p", num_ranks, num_microbatches, work, num_ranks)


def zb_2p(num_ranks: int, num_microbatches: int, work: Workload | None = None) -> Schedule:
    """One stage per rank and twice the memory of ZB-1p, which leaves next to no bubble in the span.

    Raises:
        InfeasibleError: the limit does not hold one microbatch.
    """
    return _zero_bubble("zb-2p", num_ranks, num_microbatches, work, 2 * num_ranks)


def _zero_bubble(name: str, num_ranks: int, m: int, work: Workload | None, depth: int) -> Schedule:
    work = work or Workload.uniform(num_ranks)
    most = depth * work.memory_backward
    limit = most if work.memory_limit is None else min(most, work.memory_limit)
    if limit < work.memory_backward:
        raise InfeasibleError(
            f"schedule {name!r} has a memory limit of {limit}, but one microbatch holds "
            f"{work.memory_backward}; raise the limit or use smaller microbatches"
        )
    problem = make_problem(straight_placement(num_ranks), m, work, limit)
    orders = search(problem, by_span=True)
    assert orders is not None
    return problem.schedule(name, orders)


def search(problem: Problem, *, by_span: bool) -> Orders | None:
    """The best orders found; None if no policy can finish within the memory limit."""
    found = [(_tried(problem, policy, by_span), policy) for policy in _policies(problem)]
    (best, orders), policy = min(found, key=lambda each: each[0][0])
    if orders is None:
        return None
    rounds = _EFFORT // len(problem.needs)
    random_numbers = random.Random(0)
    for _ in range(rounds):
        varied = _vary(problem, policy, random_numbers)
        (other, found_orders) = _tried(problem, varied, by_span)
        if found_orders is not None and other <= best:
            best, orders, policy = other, found_orders, varied
    return reorder(problem, orders, by_span=by_span, plays=4 * rounds)


def _tried(problem: Problem, policy: Policy, by_span: bool) -> tuple[Score, Orders | None]:
    orders = greedy(problem, policy)
    timeline = play(problem, orders) if orders else None
    return (score(problem, timeline, by_span), orders) if timeline else ((float("inf"),), None)


def _policies(problem: Problem) -> Iterator[Policy]:
    """Every combination of a few fills, patiences and preferences, with the warmup of ZB-H2 or a longer one."""
    p, m = problem.num_ranks, problem.num_microbatches
    warmups = {
        tuple(m if extra is None else min(2 * (p - rank) - 1 + extra, m) for rank in problem.placement)
        for extra in _EXTRA_WARMUPS
    }
    for caps, fill, patience, first in product(sorted(warmups), _FILLS, _PATIENCES, (False, True)):
        yield Policy(fill, patience, first, caps)


def _vary(problem: Problem, policy: Policy, numbers: random.Random) -> Policy:
    """Other caps for one to three stages, and now and then another fill, patience or preference."""
    caps = list(policy.caps)
    stages = range(len(caps))
    for stage in numbers.sample(stages, min(numbers.choice((1, 1, 2, 3)), len(caps))):
        near = caps[stage] + numbers.choice((-2, -1, 1, 2))
        far = numbers.randint(1, problem.num_microbatches)
        caps[stage] = min(max(numbers.choice((near, far)), 1), problem.num_microbatches)
    varied = replace(policy, caps=tuple(caps))
    match numbers.randrange(10):
        case 0:
            return replace(varied, fill=numbers.choice(_FILLS))
        case 1:
            return replace(varied, patience=numbers.choice(_PATIENCES))
        case 2:
            return replace(varied, forward_first=not policy.forward_first)
    return varied
