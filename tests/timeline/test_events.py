"""Events as columns: a sequence like any other, and figures of merit that do not care how they are held."""

import pytest
from bare_programs import lower

from pipec.ir import Instruction, Link, Op, Payload
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule
from pipec.timeline.events import Event, Events, Timeline
from pipec.timeline.simulate import SimulationCosts, simulate

LINK = Link(0, 1, Payload.ACTIVATION, ())
EVENTS = (
    Event(0, Instruction(Op.FORWARD, 0, 0), 0.0, 1.0),
    Event(0, Instruction(Op.SEND, 0, 0, LINK, peer=1), 1.0, 1.5),
    Event(1, Instruction(Op.FORWARD, 1, 0), 1.5, 4.0),
)


def test_events_read_like_a_tuple() -> None:
    events = Events.of(EVENTS)
    assert (len(events), tuple(events), events[1], events[-1]) == (3, EVENTS, EVENTS[1], EVENTS[2])
    assert events[1:] == EVENTS[1:]
    assert events == EVENTS
    assert events == Events.of(list(EVENTS))
    assert events != EVENTS[:2]
    assert events != (EVENTS[0], EVENTS[2], EVENTS[1])
    assert repr(events) == repr(EVENTS)
    assert Events.of(events) is events
    assert tuple(Events.of(())) == ()
    with pytest.raises(IndexError):
        events[3]


def test_a_loop_over_many_events_makes_them_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipec.timeline.events._CHUNK", 2)
    assert list(Events.of(EVENTS)) == list(EVENTS)


def test_figures_of_merit_of_a_recorded_step() -> None:
    timeline = Timeline(EVENTS, (1, 1, 0))
    assert (timeline.makespan, timeline.span) == (4.0, 2.5)
    assert timeline.bubble_rate == pytest.approx(1 - 3.5 / 7.5)
    assert (tuple(timeline.computes), tuple(timeline.messages)) == (EVENTS[::2], EVENTS[1:2])


def test_a_simulated_step_equals_its_events_one_by_one() -> None:
    links = chain_links(3)
    simulated = simulate(
        lower(make_schedule("zb-h1", 3, 5), links), SimulationCosts.uniform(3, links=links, message=0.3)
    )
    listed = Timeline(tuple(simulated.events), simulated.peak_in_flight, simulated.unit)
    assert simulated == listed
    for name in ("makespan", "span", "bubble_rate", "overhead_rate"):
        assert getattr(simulated, name) == getattr(listed, name)
