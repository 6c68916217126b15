"""Searched schedules: published bubble rates, proven optima, and each stage's own times and memory."""

import math
from dataclasses import replace

import pytest
from bare_programs import verified
from hypothesis import given, settings
from hypothesis import strategies as st

from pipec.errors import InfeasibleError, InputError
from pipec.ir import Phase, Schedule, StageMemory
from pipec.programs.lower import chain_links
from pipec.schedules import Workload, make_schedule
from pipec.schedules.chain_simulation import simulate_schedule
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
    return simulate(verified(schedule), work.costs(schedule, chain_links(schedule.num_stages)))


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


# stages that differ, and limits for each rank

UNIT = StageMemory(saved=1, weight_gradient_saved=1)


def uneven(
    *seconds: float, memory: StageMemory = UNIT, limit: float | tuple[float, ...] = math.inf
) -> Workload:
    """Stages that take ``seconds`` for each phase."""
    nothing = (0.0,) * len(seconds)
    return Workload(seconds, seconds, seconds, nothing, nothing[1:], (memory,) * len(seconds), limit)


def test_every_rank_stays_within_its_own_limit() -> None:
    """Ranks 0 and 2 hold as much as they like; rank 1 has room for two microbatches."""
    work = uneven(1, 1, 1, limit=(math.inf, 2.0, math.inf))
    tight, roomy = (
        make_schedule("zb-2p", 3, 8, each) for each in (work, replace(work, memory_limit=math.inf))
    )
    assert work.peak_memory(tight)[1] == 2
    assert work.peak_memory(roomy)[1] > 2
    tight_span, roomy_span = (simulate_schedule(each, work)[0].makespan for each in (tight, roomy))
    assert tight_span >= roomy_span
    assert work.fits_memory(tight)
    assert not work.fits_memory(roomy)
    with pytest.raises(InfeasibleError, match=r"holds up to \d on a rank, but the memory limit is 2"):
        work.check_memory(roomy)


def test_weights_gradients_and_the_running_phase_count_against_the_limit() -> None:
    memory = StageMemory(
        weights=10, gradients=10, saved=2, weight_gradient_saved=1, transient=dict.fromkeys(Phase, 5.0)
    )
    schedule = make_schedule("1f1b", 2, 4)
    work = uneven(1, 1, memory=memory, limit=29)
    assert work.peak_memory(schedule) == (20 + 2 * 2 + 5, 20 + 2 + 5)
    assert work.available_memory(schedule.placement) == (4, 4)
    assert work.fits_memory(schedule)
    assert not replace(work, memory_limit=(28.0, 29.0)).fits_memory(schedule)
    assert replace(work, memory_limit=24.0).available_memory(schedule.placement) == (0, 0)
    with pytest.raises(InfeasibleError, match="limit of 1, but one microbatch holds 2"):
        make_schedule("zb-1p", 2, 4, replace(work, memory_limit=26.0))


def test_a_stage_that_recomputes_takes_longer_backwards() -> None:
    work = replace(uneven(1, 1), recompute=(0.5, 0.0))
    assert [work.seconds(phase, 0) for phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT)] == [2.5, 1.5]
    assert work.seconds(Phase.BACKWARD_WEIGHT, 0) == 1
