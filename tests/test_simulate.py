"""Simulation: hand-computed timelines, what waits for what, and memory over time."""

from itertools import pairwise

import pytest
from example_schedules import result_link, tied_links, v_gpipe
from hypothesis import given, settings
from hypothesis import strategies as st

from pipec.attribution import Held, critical_path, memory_over_time, waiting_time, waits
from pipec.errors import InputError, VerifyError
from pipec.ir import Op, Phase, Program, Schedule
from pipec.lower import chain_links, lower
from pipec.schedules import forward_only, make_schedule
from pipec.simulate import Costs, Timeline, peak_in_flight, simulate


def played(schedule: Schedule, **costs: float) -> Timeline:
    links = chain_links(schedule.num_stages)
    return simulate(lower(schedule, links), Costs.uniform(schedule.num_stages, links=links, **costs))


def test_a_message_delays_its_reader_and_overlaps_the_computes_of_its_sender() -> None:
    links = (*chain_links(2), result_link(1))
    costs = Costs.uniform(2, links=links[:2], message=0.5)
    timeline = simulate(lower(make_schedule("gpipe", 2, 2), links), costs)
    shown = [(e.rank, e.instruction.op, e.instruction.microbatch, e.start, e.end) for e in timeline.events]
    assert shown == [
        (0, Op.FORWARD, 0, 0.0, 1.0),
        (0, Op.SEND, 0, 1.0, 1.5),
        (0, Op.FORWARD, 1, 1.0, 2.0),
        (0, Op.SEND, 1, 2.0, 2.5),
        (0, Op.BACKWARD, 0, 6.0, 8.0),
        (0, Op.BACKWARD, 1, 8.0, 10.0),
        (1, Op.FORWARD, 0, 1.5, 2.5),
        (1, Op.FORWARD, 1, 2.5, 3.5),
        (1, Op.BACKWARD, 0, 3.5, 5.5),
        (1, Op.SEND, 0, 5.5, 6.0),
        (1, Op.BACKWARD, 1, 5.5, 7.5),
        (1, Op.SEND, 1, 7.5, 8.0),
        (1, Op.SEND, -1, 7.5, 7.5),
    ]
    assert (timeline.makespan, timeline.span, timeline.num_ranks) == (10.0, 10.0, 2)
    assert timeline.bubble_rate == pytest.approx(1 - 12 / 20)


def test_moves_within_a_rank_take_no_time() -> None:
    assert played(v_gpipe(1, 2), message=5).makespan == 2 * 2 * 3


def test_a_weight_that_arrives_late_delays_the_first_forward_and_a_late_gradient_the_end() -> None:
    weight, gradient = tied_links(0, 1)
    links = (*chain_links(2), weight, gradient)
    compute = Costs.uniform(2).compute
    timeline = simulate(lower(make_schedule("1f1b", 2, 1), links), Costs(compute, {weight: 7, gradient: 9}))
    forward = next(e for e in timeline.computes if e.rank == 1)
    assert forward.start == 7
    assert (timeline.makespan, timeline.span) == (10 + 9, 12)
    assert timeline.unit == "s"


def test_recomputing_is_busy_for_the_bubble_but_lost_for_the_overhead() -> None:
    schedule, links = make_schedule("1f1b", 2, 4), chain_links(2)
    timeline = simulate(lower(schedule, links, [0, 1]), Costs.uniform(2))
    assert timeline.span == 4 * 4 + 3  # the first replay on rank 0 fits into its bubble
    assert timeline.bubble_rate == pytest.approx(1 - 16 / 19)
    assert timeline.overhead_rate == pytest.approx(1 - 12 / 19)


def test_forwards_alone_hold_one_microbatch() -> None:
    schedule = forward_only(make_schedule("1f1b", 3, 5))
    timeline = simulate(lower(schedule, chain_links(3, training=False)), Costs.uniform(3))
    assert (timeline.makespan, timeline.span, timeline.peak_in_flight) == (7, 5, (1, 1, 1))


def test_a_program_without_instructions_takes_no_time() -> None:
    timeline = simulate([Program(0, ())], Costs({}))
    assert (timeline.makespan, timeline.span, timeline.bubble_rate, timeline.peak_in_flight) == (
        0,
        0,
        0,
        (0,),
    )
    assert peak_in_flight(Program(0, ())) == 0


def test_a_missing_cost_is_named() -> None:
    costs = Costs({(0, Phase.FORWARD): 1.0})
    with pytest.raises(InputError, match="no cost is given for backward of stage 0"):
        simulate(lower(make_schedule("gpipe", 1, 2), ()), costs)


def test_waiting_for_what_is_never_sent_is_an_error() -> None:
    programs = lower(make_schedule("gpipe", 2, 2), chain_links(2))
    unsent = tuple(each for each in programs[0].instructions if each.op is not Op.SEND)
    with pytest.raises(
        VerifyError, match=r"rank 0 at instruction 4, rank 1 at instruction 2; verify_programs tells why"
    ):
        simulate([Program(0, unsent), programs[1]], Costs.uniform(2))


def test_a_wait_names_the_message_that_ends_it() -> None:
    timeline = played(make_schedule("1f1b", 2, 2), message=0.5)
    first, second, third = waits(timeline)
    assert (first.compute.rank, first.start, first.seconds, first.seconds_on_the_way) == (0, 2.0, 3.0, 0.5)
    assert (first.message.rank, first.message.instruction.op, first.message.end) == (1, Op.SEND, 5.0)
    assert (second.compute.rank, second.seconds) == (0, 1.0)
    assert (third.compute.rank, third.start, third.seconds) == (1, 0.0, 1.5)
    assert waiting_time(timeline) == {(0, 1): 4.0, (1, 0): 1.5}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["1f1b", "zb-h1", "zb-v"]), st.integers(1, 5), st.integers(1, 8), st.floats(0, 2))
def test_waits_and_computes_fill_the_time_of_each_rank(name: str, p: int, m: int, message: float) -> None:
    timeline = played(make_schedule(name, p, m), message=message, forward=1.3, backward_weight=0.7)
    idle = waits(timeline)
    for rank in range(p):
        computes = [event for event in timeline.computes if event.rank == rank]
        busy = sum(event.end - event.start for event in computes)
        waited = sum(wait.seconds for wait in idle if wait.compute.rank == rank)
        assert busy + waited == pytest.approx(max(event.end for event in computes))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["1f1b", "zb-h1", "zb-v"]), st.integers(1, 5), st.integers(1, 8), st.floats(0, 2))
def test_the_critical_path_leads_from_the_start_to_the_end_without_a_pause(
    name: str, p: int, m: int, message: float
) -> None:
    timeline = played(make_schedule(name, p, m), message=message)
    path = critical_path(timeline)
    assert (path[0].start, path[-1].end) == (0.0, timeline.makespan)
    for before, after in pairwise(path):
        assert before.end == pytest.approx(after.start)
        assert before.rank == after.rank or not before.is_compute


def test_the_critical_path_of_one_microbatch_is_everything() -> None:
    path = critical_path(played(make_schedule("1f1b", 3, 1), message=0.5))
    ops = [event.instruction.op.value for event in path]
    assert ops == ["forward", "send"] * 2 + ["forward"] + ["backward", "send"] * 2 + ["backward"]


def test_memory_rises_with_forwards_and_falls_with_backwards() -> None:
    timeline = played(make_schedule("zb-h1", 2, 2))
    held = {stage: Held(backward=3, weight=1) for stage in range(2)}
    first, second = memory_over_time(timeline, held)
    assert first == [(0.0, 3.0), (1.0, 6.0), (4.0, 4.0), (5.0, 3.0), (6.0, 1.0), (7.0, 0.0)]
    assert second[0] == (0.0, 0.0)
    for name, p, m in (("1f1b", 4, 8), ("zb-h2", 3, 9), ("zb-v", 3, 6)):
        timeline = played(make_schedule(name, p, m))
        peaks = tuple(max(amount for _, amount in steps) for steps in memory_over_time(timeline))
        assert peaks == timeline.peak_in_flight
