"""Searched schedules against published bubble rates and proven optima."""

import pytest
from bare_programs import lower, verify_programs
from hypothesis import given, settings
from hypothesis import strategies as st

from pipec.errors import InfeasibleError, InputError
from pipec.ir import Schedule
from pipec.programs.lower import chain_links
from pipec.schedules import Workload, make_schedule
from pipec.schedules.search import Tasks, time_orders
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate

TABLE_5 = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083, 0.0433)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444, 0.0026)),
    (8, 32, (29.802, 29.428, 19.530, 0.577), (0.1898, 0.1045, 0.0559, 0.0022)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672, 0.0066)),
    (16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266, 0.0028)),
    (32, 128, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1106, 0.0490, 0.0029)),
]
"""Table 5 of Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024).

p, m, milliseconds of F, B, W and a message, and the bubble rates of 1F1B, ZB-H1, ZB-H2 and ZB-2p.
"""

HIDDEN_AND_HEADS = {18: (2304, 24), 29: (4096, 32), 11: (5120, 40), 10: (6144, 48)}
"""The models of these rows, by their whole milliseconds of F: hidden size and attention heads."""


def workload(p: int, f: float, b: float, w: float, message: float, **memory: float) -> Workload:
    return Workload.uniform(p, forward=f, backward_input=b, backward_weight=w, message=message, **memory)


def published(p: int, f: float, b: float, w: float, message: float) -> Workload:
    """A row's costs, with the bytes that a token holds in a layer of its model."""
    hidden, heads = HIDDEN_AND_HEADS[int(f)]
    held = 34 * hidden + 5 * heads * 1024
    return workload(p, f, b, w, message, memory_backward=held, memory_weight=32 * hidden)


def played(schedule: Schedule, work: Workload) -> Timeline:
    links = chain_links(schedule.num_stages)
    programs = lower(schedule, links)
    verify_programs(programs, schedule.placement, links, schedule.num_microbatches)
    return simulate(programs, work.costs(schedule, links))


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE_5, ids=lambda row: f"{row[0]}-{row[1]}")
def test_bubble_rates_of_the_zero_bubble_paper(row: tuple) -> None:
    p, m, costs, (*fixed, best) = row
    work = published(p, *costs)
    for name, rate in zip(("1f1b", "zb-h1", "zb-h2"), fixed, strict=True):
        assert round(played(make_schedule(name, p, m), work).overhead_rate, 4) == rate
    searched = make_schedule("zb-2p", p, m, work)
    assert round(played(searched, work).overhead_rate, 4) <= best
    assert max(work.peak_memory(searched)) <= 2 * p * work.memory[0].saved


@pytest.mark.parametrize(("limit", "span"), [(3, 31), (4, 27), (5, 26), (6, 25), (7, 24)])
def test_the_search_finds_the_proven_optimum_on_a_straight_placement(limit: int, span: int) -> None:
    """Proved by constraint programming for p = 4, m = 8 and F = B = W = 1 without communication."""
    work = Workload.uniform(4, memory_limit=limit)
    schedule = make_schedule("zb-2p", 4, 8, work)
    assert played(schedule, work).span == span
    assert max(work.peak_memory(schedule)) <= limit


costs = st.tuples(*[st.integers(1, 5)] * 3, st.integers(0, 2))


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["zb-h1", "zb-h2"]),
    st.integers(1, 5),
    st.integers(1, 12),
    st.tuples(*[st.integers(1, 5)] * 3, st.integers(0, 6)),
)
def test_the_search_plays_orders_as_the_simulator_plays_programs(
    name: str, p: int, m: int, each: tuple[int, int, int, int]
) -> None:
    """With messages that take longer than what makes them, too."""
    work, schedule = workload(p, *each), make_schedule(name, p, m)
    tasks = Tasks.of(work, m, memory_limits=[m] * p)
    timeline = time_orders(tasks, tasks.orders(schedule))
    simulated = played(schedule, work)
    assert timeline
    assert max(timeline.spans) == pytest.approx(simulated.span)
    assert timeline.makespan == pytest.approx(simulated.makespan)
    assert tasks.schedule(name, tasks.orders(schedule)) == schedule


def test_a_limit_below_one_microbatch_is_refused() -> None:
    work = Workload.uniform(2, memory_backward=3, memory_limit=2)
    with pytest.raises(
        InfeasibleError, match=r"'zb-1p' has a memory limit of 2, but one microbatch holds 3;"
    ):
        make_schedule("zb-1p", 2, 4, work)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": -1.0}, "forward is -1.0; expected 0 or more"),
        ({"message": -0.5}, "message is -0.5; expected 0 or more"),
        ({"memory_backward": 0}, "memory_backward is 0; expected more than 0"),
    ],
)
def test_costs_that_cannot_be_are_refused(costs: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Workload.uniform(2, **costs)
