"""What ranks wait for, the critical path, and what ranks hold: read off small steps, and true of all."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from bare_programs import lower, uniform_costs
from hypothesis import given
from hypothesis import strategies as st
from simulated_updates import EVERYTHING, ended

from pipec.ir import Instruction, Link, Op, Payload, Schedule, Value
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule, zb_h1, zb_v
from pipec.timeline.attribution import (
    attribute_waits,
    critical_path,
    critical_path_times,
)
from pipec.timeline.curves import in_flight_over_time
from pipec.timeline.events import Event, Timeline
from pipec.timeline.rank_times import rank_times
from pipec.timeline.simulate import simulate
from pipec.timeline.step_events import Waits


def played(schedule: Schedule, links: tuple[Link, ...] = (), **costs: float) -> Timeline:
    links = (*chain_links(schedule.num_stages), *links)
    return simulate(lower(schedule, links), uniform_costs(schedule.num_stages, links=links, **costs))


def named(timeline: Timeline, index: int) -> str:
    """``forward 1.0`` is the forward of stage 1 for microbatch 0, ``send 1.0`` a message it sends."""
    if index < 0:
        return "nothing"
    instruction = timeline.events[index].instruction
    return f"{instruction.op} {instruction.stage}.{instruction.microbatch}"


endings = st.builds(
    lambda replicas, microbatches, options: ended(replicas, microbatches, **options),
    st.sampled_from([1, 2, 3, (3, 2, 1), (1, 2), (2, 1)]),
    st.integers(3, 7),
    st.sampled_from([{}, {"updates": True}, {"updates": True, "clips": True}, EVERYTHING]),
)

timelines = endings | st.builds(
    lambda make, ranks, microbatches, forward, message: played(
        make(ranks, microbatches), forward=forward, message=message
    ),
    st.sampled_from([lambda p, m: make_schedule("1f1b", p, m), zb_h1, zb_v]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0.0, 0.1, 0.7, 2.5]),
)


def recorded(*waits: tuple[int, int, float, float]) -> Timeline:
    """Two microbatches, as recorded: messages last until they are awaited, and rank 1 is busy until 3."""
    link = Link(0, 1, Payload.ACTIVATION, ())
    events = (
        Event(0, Instruction(Op.FORWARD, 0, 0), 0.0, 1.0),
        Event(0, Instruction(Op.SEND, 0, 0, link, peer=1), 1.0, 1.2),
        Event(0, Instruction(Op.FORWARD, 0, 1), 1.0, 2.7),
        Event(0, Instruction(Op.SEND, 0, 1, link, peer=1), 2.7, 3.4),
        Event(1, Instruction(Op.FORWARD, 1, 0), 1.2, 3.0),
        Event(1, Instruction(Op.FORWARD, 1, 1), 3.4, 6.0),
    )
    return Timeline(events, (1, 2), waits=waits_of(events, *waits))


def waits_of(events: Sequence[Event], *waits: tuple[int, int, float, float]) -> Waits:
    """Waits as rows: the event awaited, the one that follows, and when the wait began and ended."""
    awaited, following, starts, ends = map(np.array, zip(*waits, strict=True))
    ranks = np.array([events[each if each >= 0 else at].rank for at, each, *_ in waits])
    return Waits(ranks, awaited, following, starts, ends)


def test_a_recorded_wait_tells_its_time_and_what_it_was_for() -> None:
    """One that found its message there does not: what the rank did from 3 to 3.4 is its own."""
    for begin, own, blocking in ((3.4, 0.4, "forward 1.0"), (3.1, 0.1, "send 0.1")):
        timeline = recorded((1, 4, 0.0, 1.2), (3, 5, begin, 3.4))
        found = attribute_waits(timeline)
        assert found.idle[-1] == pytest.approx(0.4)
        assert bool(found.awaited[-1] < 0) is (begin == 3.4)
        assert named(timeline, found.blocking_event[-1]) == blocking
        times = rank_times(timeline, found)[1]
        assert times.unattributed_idle == pytest.approx(own)
        assert [wait.time for wait in times.waits] == [pytest.approx(1.6 - own)]


def test_of_two_waits_the_one_that_held_the_rank_last_is_blamed() -> None:
    """The message of a skip link comes at 4, when the wait before it has held rank 2 until 3."""
    links = (*chain_links(3), Link(0, 2, Payload.ACTIVATION, (Value("skip", "float32", ("b",)),)))
    costs = uniform_costs(3)
    slow = {links[-1]: 3.0, links[1]: 1.0}
    timeline = simulate(lower(make_schedule("gpipe", 3, 1), links), replace(costs, messages=slow))
    found = attribute_waits(timeline)
    (reader,) = [k for k in range(len(timeline.events)) if named(timeline, k) == "forward 2.0"]
    message = timeline.events[found.awaited[reader]]
    assert (message.rank, message.end, found.idle[reader]) == (0, 4.0, 4.0)
    own = [(wait.rank, wait.time) for wait in rank_times(timeline, found)[2].waits]
    assert own == [(1, 3.0), (0, 1.0)]


def waited(timeline: Timeline, rank: int) -> list[tuple[int, int, str, float]]:
    times = rank_times(timeline, attribute_waits(timeline))[rank]
    return [(each.rank, each.stage, each.what, each.time) for each in times.waits]


def test_what_overlaps_counts_once_on_the_critical_path() -> None:
    """A recorded norm may begin while the sum before it is still under way."""
    events = (
        Event(0, Instruction(Op.BACKWARD, 0, 0), 0.0, 2.0),
        Event(0, Instruction(Op.REDUCE_GRAD, 0, bucket=0), 2.0, 5.0),
        Event(0, Instruction(Op.GRAD_NORM, -1), 2.5, 6.0),
        Event(0, Instruction(Op.UPDATE, 0), 6.0, 7.0),
    )
    timeline = Timeline(events, (1,), waits=waits_of(events, (1, 3, 2.0, 5.0), (2, 3, 5.0, 6.0)))
    path = critical_path(timeline, attribute_waits(timeline))
    assert path == (0, 1, 2, 3)
    assert critical_path_times(timeline, path) == [2.0, 3.0, 1.0, 1.0]


def recorded_sum(starts: tuple[float, float]) -> Timeline:
    """Two replicas that begin a sum at these times and find it over at 6 and 7."""
    events = tuple(
        event
        for rank in range(2)
        for event in (
            Event(rank, Instruction(Op.BACKWARD, 0, rank), 0.0, 1.0),
            Event(rank, Instruction(Op.REDUCE_GRAD, 0, bucket=0), starts[rank], 6.0 + rank),
        )
    )
    waits = waits_of(events, (1, -1, starts[0], 6.0), (3, -1, starts[1], 7.0))
    return Timeline(events, (1, 1), waits=waits)


def test_a_recorded_sum_begins_when_the_last_rank_has_begun_it() -> None:
    timeline = recorded_sum((1.0, 4.0))
    assert waited(timeline, 0) == [(1, 0, Op.REDUCE_GRAD, 3.0), (0, 0, Op.REDUCE_GRAD, 2.0)]
    assert waited(timeline, 1) == [(1, 0, Op.REDUCE_GRAD, 3.0)]
    assert rank_times(timeline, attribute_waits(timeline))[1].unattributed_idle == 3.0
    assert waited(recorded_sum((2.0, 1.0)), 1) == [(1, 0, Op.REDUCE_GRAD, 5.0), (0, 0, Op.REDUCE_GRAD, 1.0)]


@given(timelines)
def test_the_critical_path_accounts_for_the_whole_makespan(timeline: Timeline) -> None:
    events = [timeline.events[index] for index in critical_path(timeline, attribute_waits(timeline))]
    assert sum(event.end - event.start for event in events) == pytest.approx(timeline.makespan)
    assert events[0].start == 0
    assert [one.end for one in events[:-1]] == pytest.approx([other.start for other in events[1:]])


@given(timelines)
def test_curves_reach_the_peak_in_flight_and_return_to_nothing(timeline: Timeline) -> None:
    curves = in_flight_over_time(timeline)
    assert tuple(curve.amounts.max() for curve in curves) == timeline.peak_in_flight
    assert all(curve.amounts[-1] == 0 for curve in curves)
    for curve in curves:
        times = curve.times.tolist()
        assert times == sorted(set(times))


@given(timelines)
def test_the_parts_of_each_rank_s_time_add_up_to_the_makespan(timeline: Timeline) -> None:
    for time in rank_times(timeline, attribute_waits(timeline)):
        assert time.busy + time.waiting + time.unattributed_idle + time.trailing_idle == pytest.approx(
            timeline.makespan
        )
        lengths = [each.time for each in time.waits]
        assert lengths == sorted(lengths, reverse=True)
