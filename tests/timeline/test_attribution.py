"""What ranks wait for, the critical path, and what ranks hold: read off small steps, and true of all."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from bare_programs import lower, uniform_costs
from hypothesis import given
from simulated_steps import TIMELINES

from pipec.ir import Instruction, Link, Op, Payload, Program, Value
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule
from pipec.timeline.attribution import attribute_waits, critical_path, critical_path_times
from pipec.timeline.curves import in_flight_over_time
from pipec.timeline.events import Event, Timeline
from pipec.timeline.rank_times import RankTime, rank_times
from pipec.timeline.simulate import simulate
from pipec.timeline.step_events import Waits
from pipec.timeline.trace import measured_timeline


def named(timeline: Timeline, index: int) -> str:
    """``forward 1.0`` is the forward of stage 1 for microbatch 0, ``send 1.0`` a message it sends."""
    instruction = timeline.events[index].instruction
    return f"{instruction.op} {instruction.stage}.{instruction.microbatch}"


def recorded(*ranks: Sequence[tuple[Instruction, float, float]]) -> Timeline:
    """A step in which each rank ran these instructions, from one time to another. Clocks began before it."""
    programs = [Program(rank, tuple(each for each, *_ in own)) for rank, own in enumerate(ranks)]
    times = [[round(1e9 * (7 + time)) for _, *span in own for time in span] for own in ranks]
    return measured_timeline(programs, dict(enumerate(times)))


def test_a_recorded_wait_tells_its_time_and_what_it_was_for() -> None:
    """One that found its message there does not: what the rank did from 3 to 3.4 is its own."""
    link = Link(0, 1, Payload.ACTIVATION, ())
    sends = [Instruction(Op.SEND, 0, microbatch, link, peer=1) for microbatch in range(2)]
    waits = [Instruction(Op.WAIT_RECV, 1, microbatch, link, peer=0) for microbatch in range(2)]
    first, second = ([Instruction(Op.FORWARD, stage, mb) for mb in range(2)] for stage in range(2))
    sender = [(first[0], 0, 1), (sends[0], 1, 1), (first[1], 1, 2.7), (sends[1], 2.7, 2.7)]
    for begin, own, blocking in ((3.4, 0.4, "forward 1.0"), (3.1, 0.1, "send 0.1")):
        reader = [(waits[0], 0, 1.2), (second[0], 1.2, 3.0), (waits[1], begin, 3.4), (second[1], 3.4, 6.0)]
        timeline = recorded(sender, reader)
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


def test_what_overlaps_counts_once_on_the_critical_path() -> None:
    """A recorded norm may begin while the sum before it is still under way."""
    events = (
        Event(0, Instruction(Op.BACKWARD, 0, 0), 0.0, 2.0),
        Event(0, Instruction(Op.REDUCE_GRAD, 0, bucket=0), 2.0, 5.0),
        Event(0, Instruction(Op.GRAD_NORM, -1), 2.5, 6.0),
        Event(0, Instruction(Op.UPDATE, 0), 6.0, 7.0),
    )
    waits = Waits(*map(np.array, [(0, 0), (1, 2), (3, 3), (2.0, 5.0), (5.0, 6.0)]))
    timeline = Timeline(events, (1,), waits=waits)
    path = critical_path(timeline, attribute_waits(timeline))
    assert path == (0, 1, 2, 3)
    assert critical_path_times(timeline, path) == [2.0, 3.0, 1.0, 1.0]


def test_a_recorded_sum_begins_when_the_last_rank_has_begun_it() -> None:
    """Two replicas find it over at 6 and 7."""
    backward, reduce = Instruction(Op.BACKWARD, 0, 0), Instruction(Op.REDUCE_GRAD, 0, bucket=0)
    wait = replace(reduce, op=Op.WAIT_REDUCE_GRAD)

    def times(*starts: float) -> list[RankTime]:
        spans = zip(starts, (6, 7), strict=True)
        timeline = recorded(
            *([(backward, 0, 1), (reduce, start, start), (wait, start, end)] for start, end in spans)
        )
        return rank_times(timeline, attribute_waits(timeline))

    def waited(time: RankTime) -> list[tuple[int, int, str, float]]:
        return [(each.rank, each.stage, each.what, pytest.approx(each.time)) for each in time.waits]

    first, second = times(1.0, 4.0)
    assert waited(first) == [(1, 0, Op.REDUCE_GRAD, 3.0), (0, 0, Op.REDUCE_GRAD, 2.0)]
    assert waited(second) == [(1, 0, Op.REDUCE_GRAD, 3.0)]
    assert second.unattributed_idle == pytest.approx(3.0)
    assert waited(times(2.0, 1.0)[1]) == [(1, 0, Op.REDUCE_GRAD, 5.0), (0, 0, Op.REDUCE_GRAD, 1.0)]


@given(TIMELINES)
def test_the_critical_path_accounts_for_the_whole_makespan(timeline: Timeline) -> None:
    events = [timeline.events[index] for index in critical_path(timeline, attribute_waits(timeline))]
    assert sum(event.end - event.start for event in events) == pytest.approx(timeline.makespan)
    assert events[0].start == 0
    assert [one.end for one in events[:-1]] == pytest.approx([other.start for other in events[1:]])


@given(TIMELINES)
def test_curves_reach_the_peak_in_flight_and_return_to_nothing(timeline: Timeline) -> None:
    curves = in_flight_over_time(timeline)
    assert tuple(curve.amounts.max() for curve in curves) == timeline.peak_in_flight
    assert all(curve.amounts[-1] == 0 for curve in curves)
    for curve in curves:
        times = curve.times.tolist()
        assert times == sorted(set(times))


@given(TIMELINES)
def test_the_parts_of_each_rank_s_time_add_up_to_the_makespan(timeline: Timeline) -> None:
    for time in rank_times(timeline, attribute_waits(timeline)):
        assert time.busy + time.waiting + time.unattributed_idle + time.trailing_idle == pytest.approx(
            timeline.makespan
        )
        lengths = [each.time for each in time.waits]
        assert lengths == sorted(lengths, reverse=True)
