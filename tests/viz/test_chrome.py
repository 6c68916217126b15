"""Timelines as Chrome trace events: the structure viewers rely on, and numbers that add up."""

import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from bare_programs import lower, uniform_costs
from example_schedules import result_link, tied_links
from hypothesis import given
from hypothesis import strategies as st
from simulated_updates import EVERYTHING, ended

from pipec.errors import InputError
from pipec.ir import Schedule
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule, zb_h1, zb_v
from pipec.timeline.curves import Curve, MemoryCurves
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate
from pipec.viz import DrawnStep, chrome_trace

TraceEvent = dict[str, Any]


def played(schedule: Schedule, tied: bool = False, **costs: float | str) -> Timeline:
    last = schedule.num_stages - 1
    links = (*chain_links(schedule.num_stages), result_link(last), *(tied_links(last, 0) if tied else ()))
    return simulate(lower(schedule, links), uniform_costs(schedule.num_stages, links=links, **costs))


def trace_of(timelines: Mapping[str, Timeline], **memory: list[MemoryCurves]) -> str:
    return chrome_trace(
        [DrawnStep("1f1b", 8, each, memory.get(name, ()), name) for name, each in timelines.items()]
    )


def traced(timelines: Mapping[str, Timeline], **memory: list[MemoryCurves]) -> dict[str, list[TraceEvent]]:
    """The events of the trace by their ``ph``."""
    by_phase = defaultdict(list)
    for event in json.loads(trace_of(timelines, **memory))["traceEvents"]:
        by_phase[event["ph"]].append(event)
    return by_phase


def tracks(slices: list[TraceEvent]) -> dict[tuple[int, int], list[TraceEvent]]:
    found = defaultdict(list)
    for event in slices:
        found[event["pid"], event["tid"]].append(event)
    return found


def end(event: TraceEvent) -> float:
    return float(event["ts"] + event["dur"])


timelines = st.builds(
    lambda make, ranks, microbatches, forward, message: played(
        make(ranks, microbatches), True, forward=forward, message=message, unit="s"
    ),
    st.sampled_from([lambda p, m: make_schedule("1f1b", p, m), zb_h1, zb_v]),
    st.integers(2, 4),
    st.integers(1, 6),
    st.floats(1e-7, 1e-2),
    st.floats(0, 1e-2),
)


def test_a_process_per_timeline_a_track_per_rank_and_a_slice_per_compute() -> None:
    """A slice says what its rank waited for."""
    step = played(make_schedule("gpipe", 2, 1), message=0.5e-3, forward=2e-3, unit="s")
    trace = traced({"planned": step, "measured": step})
    names = [(e["pid"], e["tid"], e["args"]["name"]) for e in trace["M"] if "name" in e["args"]]
    assert names == [
        *[(1, 0, "planned"), (1, 1, "rank 0"), (1, 2, "rank 1")],
        *[(2, 0, "measured"), (2, 1, "rank 0"), (2, 2, "rank 1")],
    ]
    assert {key: len(slices) for key, slices in tracks(trace["X"]).items()} == dict.fromkeys(
        [(1, 1), (1, 2), (2, 1), (2, 2)], 2
    )
    slices = {(event["name"], event["pid"], event["tid"]): event for event in trace["X"]}
    waited = {"waited_us": 2500.0, "waited_for": "activation of microbatch 0 from rank 0"}
    assert slices["F0", 1, 2] == {
        **{"ph": "X", "name": "F0", "pid": 1, "tid": 2, "cat": "forward", "ts": 2500.0, "dur": 2000.0},
        "args": {"phase": "forward", "stage": 1, "microbatch": 0, **waited},
    }
    assert slices["B0", 2, 2]["args"] == {"phase": "backward", "stage": 1, "microbatch": 0}


def test_counters_follow_what_is_in_flight_and_the_bytes_given() -> None:
    timeline = played(make_schedule("gpipe", 1, 2))
    curve = Curve.of([(0.0, 64), (6.0, 0)])
    memory = MemoryCurves(curve, {"parameters": curve.amounts / 4, "saved": curve.amounts * 3 / 4})
    trace = traced({"step": timeline}, step=[memory])
    counters = [(event["name"], event["ts"], event["args"]) for event in trace["C"]]
    assert counters == [
        ("in flight, rank 0", 0.0, {"microbatches": 1}),
        ("in flight, rank 0", 1000.0, {"microbatches": 2}),
        ("in flight, rank 0", 4000.0, {"microbatches": 1}),
        ("in flight, rank 0", 6000.0, {"microbatches": 0}),
        ("memory, rank 0", 0.0, {"parameters": 16, "saved": 48}),
        ("memory, rank 0", 6000.0, {"parameters": 0, "saved": 0}),
    ]


def test_results_and_weights_lent_before_any_compute_have_no_arrow() -> None:
    trace = traced({"step": played(make_schedule("1f1b", 2, 4), tied=True)})
    assert len(trace["s"]) == 4 + 4
    assert {event["name"].split()[0] for event in trace["s"]} == {"activation", "gradient"}


@pytest.mark.slow
@given(timelines)
def test_each_arrow_leads_from_a_slice_to_one_that_begins_later(timeline: Timeline) -> None:
    """Both ends lie inside one slice of their track, and slices do not overlap: a viewer binds no other."""
    trace = traced({"one": timeline, "other": timeline})
    slices = tracks(trace["X"])
    for own in slices.values():
        assert all(round(end(one), 3) <= round(other["ts"], 3) for one, other in pairwise(own))

    def bound(flow: TraceEvent) -> TraceEvent:
        track = slices[flow["pid"], flow["tid"]]
        (found,) = [each for each in track if each["ts"] < flow["ts"] < end(each)]
        return found

    assert len({flow["id"] for flow in trace["s"]}) == len(trace["s"])
    assert [flow["id"] for flow in trace["s"]] == [flow["id"] for flow in trace["f"]]
    for source, target in zip(trace["s"], trace["f"], strict=True):
        assert source["pid"] == target["pid"]
        assert end(bound(source)) <= bound(target)["ts"] + 1e-6
        assert bound(source)["args"]["microbatch"] == bound(target)["args"]["microbatch"]


def test_an_arrow_stays_in_slices_that_take_no_time() -> None:
    costs: dict[str, float] = {"forward": 0, "backward_input": 0, "backward_weight": 0}
    trace = traced({"step": played(make_schedule("1f1b", 2, 1), **costs)})
    assert {event["ts"] for event in trace["s"] + trace["f"]} == {0.0}


FIELDS = {
    "X": {"cat": str, "ts": float, "dur": float, "args": dict},
    "s": {"cat": str, "ts": float, "id": str, "bp": str},
    "f": {"cat": str, "ts": float, "id": str, "bp": str},
    "C": {"ts": float, "args": dict},
    "M": {"args": dict},
}
"""By its ``ph``, what the Trace Event Format of Chromium gives an event besides its name, pid and tid."""


@pytest.mark.parametrize("options", [{}, EVERYTHING])
def test_the_trace_keeps_to_the_trace_event_format(options: dict[str, object]) -> None:
    """Viewers pass over what they do not know, such as a flow without its category, without a word."""
    timeline = ended((3, 2, 1), 6, **options)
    curve = Curve.of([(0.0, 64), (6.0, 0)])
    text = trace_of({"a step": timeline}, **{"a step": [MemoryCurves(curve, {"saved": curve.amounts})] * 6})
    whole = json.loads(text)
    assert whole.keys() == {"displayTimeUnit", "traceEvents"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events = whole["traceEvents"]
    assert {each["ph"] for each in events} == {*FIELDS}
    for each in events:
        fields = {"ph": str, "name": str, "pid": int, "tid": int, **FIELDS[each["ph"]]}
        assert {name: type(value) for name, value in each.items()} == fields
        assert each.get("ts", 0) >= 0
        assert each.get("dur", 0) >= 0
        assert each.get("bp", "e") == "e"  # a flow ends in the slice around its time, not in the next one
        kinds = {str, int, float} if each["ph"] in "XM" else {float, int}
        assert {*map(type, each.get("args", {}).values())} <= kinds
    metadata = {each["name"] for each in events if each["ph"] == "M"}
    assert metadata == {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
    named = {(each["pid"], each["tid"]) for each in events if each["name"] in ("thread_name", "process_name")}
    assert {(each["pid"], each["tid"]) for each in events} == named


def test_a_trace_that_no_viewer_opens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = played(make_schedule("1f1b", 2, 2))
    count = len(timeline.events)
    monkeypatch.setattr("pipec.viz.chrome.MOST_EVENTS", count - 1)
    with pytest.raises(InputError, match=f"a trace of {count} events"):
        trace_of({"step": timeline})
