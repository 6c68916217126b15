"""Timelines as pictures: as text, as SVG, and as trace events for Perfetto and Chrome.

docs/schedules.md and docs/images/timeline.svg are pictures of whole schedules, compared word by word.
"""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from example_schedules import tied_links
from hypothesis import given
from simulated_steps import COUNTED, EVERYTHING, TIMELINES, drawn, ended, held, played

from pipec.errors import InputError
from pipec.ir import Instruction, Op, ShardingLevel
from pipec.schedules import make_schedule, zb_v
from pipec.timeline.curves import Curve, MemoryCurves
from pipec.timeline.events import Event, Timeline
from pipec.viz import DrawnStep, chrome_trace, timeline_svg, timeline_text
from pipec.viz.labels import COLLECTIVE_NAMES, LETTERS, NAMES, overlap_rows, payload_description, time_axis

SVG = "{http://www.w3.org/2000/svg}"
TraceEvent = dict[str, Any]


def rects(svg: str) -> Counter[str | None]:
    return Counter(rect.get("class") for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"))


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_recomputes_are_told_from_forwards() -> None:
    timeline = played(make_schedule("1f1b", 3, 3), recompute=(0,))
    text = timeline_text(timeline, "1F1B with recomputing")
    assert text.startswith("1F1B with recomputing\nbubble 33.3% (40.0% if recomputing counts as idle)")
    assert "\nrank 0 F0 F1 F2 R0 ·········B0─── R1 B1─── R2 B2───\n" in text
    assert "\nF forward  R recompute  B backward  · idle; numbers are microbatches\n" in text
    svg = timeline_svg(timeline)
    assert rects(svg) == {"card": 1, "lane": 3, "forward": 9 + 1, "backward": 9 + 1, "recompute": 3 + 1}
    assert {"F0", "B2", "R2", "recompute"} < set(texts(svg))


def test_the_tail_is_drawn() -> None:
    timeline = Timeline((Event(0, Instruction(Op.TAIL, 0), 0.0, 2.0),), (0,))
    assert "\nrank 0 T\n" in timeline_text(timeline)
    assert "T tail" in timeline_text(timeline)
    assert "T" in texts(timeline_svg(timeline))


def last_lines(timeline: Timeline) -> list[str]:
    return timeline_text(timeline).splitlines()[-2:]


def test_text_tells_the_longest_wait_and_the_critical_path() -> None:
    """Beyond three parts the others are told as one, unless that would be a single part."""
    assert last_lines(played(make_schedule("interleaved-1f1b", 4, 8), message=0.3)) == [
        "longest wait: rank 0, 11.6 units for rank 1's gradients, 1.6 units for rank 3's activations",
        "critical path: 39 units on rank 3, 6 units on rank 0, 6 units on rank 1, 10.2 units elsewhere",
    ]
    path = last_lines(played(make_schedule("1f1b", 3, 6), message=0.25))[1]
    assert path.endswith("6 units on rank 0, 2.5 units in messages")
    assert last_lines(played(make_schedule("gpipe", 1, 2))) == [
        "longest wait: none",
        "critical path: 6 units on rank 0",
    ]


def test_text_says_where_a_recorded_step_was_idle_for_no_message() -> None:
    ops = (Op.FORWARD, Op.BACKWARD)
    events = [Event(0, Instruction(op, 0, 0), 2e-3 * k, 2e-3 * k + 1.5e-3) for k, op in enumerate(ops)]
    assert last_lines(Timeline(tuple(events), (1,))) == [
        "longest wait: rank 0, 500 µs with all it needs there",
        "critical path: 3 ms on rank 0, 500 µs idle",
    ]


def test_text_breaks_a_long_timeline_into_panels_and_compresses_a_very_long_one() -> None:
    panels = timeline_text(played(make_schedule("1f1b", 4, 16))).splitlines()
    assert [line[:6] for line in panels].count("rank 3") == 2
    assert all(f" F{mb}" in "\n".join(panels) for mb in range(16))
    compressed = timeline_text(played(make_schedule("1f1b", 4, 64))).splitlines()
    assert [line[:6] for line in compressed].count("rank 3") == 1
    assert max(map(len, panels + compressed)) <= 160


@pytest.mark.parametrize("draw", [timeline_text, timeline_svg])
def test_an_empty_timeline_can_be_drawn(draw: Callable[[Timeline], str]) -> None:
    assert "bubble 0.0%" in draw(Timeline((), (0, 0)))
    instant = played(make_schedule("gpipe", 2, 2), forward=0, backward_input=0, backward_weight=0)
    assert "makespan 0 units" in draw(instant)


def test_svg_shades_the_stages_of_a_rank() -> None:
    svg = timeline_svg(played(zb_v(2, 4)))
    assert svg.count('fill-opacity="0.55"') == 3 * 4 * 2
    assert {"Fa0", "Wb3", "lighter: a later stage of the rank"} < set(texts(svg))


def test_svg_escapes_its_title_and_drops_what_xml_cannot_hold() -> None:
    svg = timeline_svg(played(make_schedule("gpipe", 1, 1)), 'a <b> & "c"\x00\x1b')
    assert 'a <b> & "c"' in texts(svg)


def test_svg_of_very_many_boxes_is_refused() -> None:
    svg = timeline_svg(played(make_schedule("gpipe", 100, 20)))
    assert rects(svg)["forward"] == 100 * 20 + 1
    assert {"rank 0", "rank 2"} <= {*texts(svg)}
    assert "rank 1" not in texts(svg), "names have room"
    event = Event(0, Instruction(Op.FORWARD, 0, 0), 0.0, 1.0)
    with pytest.raises(InputError, match=r"60,000 boxes.* draw \.html"):
        timeline_svg(Timeline((event,) * 60_000, (1,)))


def test_every_op_has_a_colour_of_its_own() -> None:
    """A legend in which two names share a colour tells nothing."""
    svg = timeline_svg(Timeline((), (0,)))
    colours = {op: re.search(rf"\.{op} {{ fill: (#\w+)", svg) for op in NAMES}
    assert len({found[1] for found in colours.values() if found}) == len(NAMES)


@pytest.mark.parametrize(
    ("makespan", "unit", "expected"),
    [
        (33.0, "units", ("units", ["0", "10", "20", "30"])),
        (0.0442, "s", ("ms", ["0", "10", "20", "30", "40"])),
        (2.1e-6, "s", ("µs", ["0", "0.5", "1", "1.5", "2"])),
        (1.0, "s", ("s", ["0", "0.2", "0.4", "0.6", "0.8", "1"])),
    ],
)
def test_the_time_axis_has_round_ticks(makespan: float, unit: str, expected: tuple[str, list[str]]) -> None:
    event = Event(0, Instruction(Op.FORWARD, 0, 0), 0.0, makespan)
    name, ticks = time_axis(Timeline((event,), (1,), unit), most=5)
    assert (name, [text for _, text in ticks]) == expected
    assert ticks[-1][0] <= makespan * (1 + 1e-9)


# steps with replicas


@pytest.mark.parametrize("replicas", [2, (3, 2, 1), (1, 2)])
@pytest.mark.parametrize("options", [{}, {"updates": True}, EVERYTHING, COUNTED])
def test_every_view_draws_every_kind_of_step(
    replicas: int | tuple[int, ...], options: dict[str, object]
) -> None:
    timeline = ended(replicas, 6, **options)
    collectives = Counter(event.instruction.op for event in timeline.events if event.is_collective)
    svg, text = timeline_svg(timeline, "a step"), timeline_text(timeline)
    drawn = rects(svg)
    for op, name in COLLECTIVE_NAMES.items():
        assert drawn[op] == collectives[op] + (op in collectives), op
        assert (f">{name}</text>" in svg) == (f"{LETTERS[op]} {name}" in text) == (op in collectives), op
    assert "Σ0" in text
    assert ("U update" in text) is bool(options.get("updates"))


def test_svg_keeps_replicas_together() -> None:
    svg = ElementTree.fromstring(timeline_svg(ended((3, 2, 1), 6)))
    tops = [float(rect.get("y", 0)) for rect in svg.iter(f"{SVG}rect") if rect.get("class") == "lane"]
    apart = [below - above for above, below in pairwise(tops)]
    assert apart[0] == apart[1] == apart[3] < apart[2] == apart[4]


def test_bytes_are_those_that_travel() -> None:
    timeline = ended(2, 4, gradient_dtype="bfloat16", updates=True, shard=ShardingLevel.OPTIMIZER)
    told = {event.instruction.op: payload_description(timeline, event) for event in timeline.overlapped}
    assert told[Op.REDUCE_GRAD] == "bucket 1 of stage 1, 384 B as bfloat16: 1.q and 2 others"
    assert told[Op.UNSHARD] == "bucket 1 of stage 1, 768 B: 1.q and 2 others"


def test_collectives_that_overlap_hide_no_other() -> None:
    """Two sums that a rank began one after the other, and found over together."""
    sums = [Event(0, Instruction(Op.REDUCE_GRAD, 0, bucket=k), 1.0 + k, 6.0 + k) for k in range(2)]
    later = Event(0, Instruction(Op.GRAD_NORM, -1), 6.5, 8.0)
    timeline = Timeline((Event(0, Instruction(Op.BACKWARD, 0, 0), 0.0, 1.0), *sums, later), (1,))
    assert overlap_rows(timeline.overlapped) == [0, 1, 0]
    svg = ElementTree.fromstring(timeline_svg(timeline))
    tops = {rect.get("y") for rect in svg.iter(f"{SVG}rect") if rect.get("class") == "reduce_grad"}
    assert len(tops) == 3  # two bands, and the legend
    assert timeline_text(timeline).count("Σ0──") == timeline_text(timeline).count("Σ1──") == 1


# trace events


def traced(*steps: DrawnStep) -> dict[str, list[TraceEvent]]:
    """The events of the trace by their ``ph``."""
    by_phase = defaultdict(list)
    for event in json.loads(chrome_trace(steps))["traceEvents"]:
        by_phase[event["ph"]].append(event)
    return by_phase


def tracks(slices: list[TraceEvent]) -> dict[tuple[int, int], list[TraceEvent]]:
    found = defaultdict(list)
    for event in slices:
        found[event["pid"], event["tid"]].append(event)
    return found


def end(event: TraceEvent) -> float:
    return float(event["ts"] + event["dur"])


def test_a_process_per_timeline_a_track_per_rank_and_a_slice_per_compute() -> None:
    """A slice says what its rank waited for."""
    step = played(make_schedule("gpipe", 2, 1), message=0.5e-3, forward=2e-3, unit="s")
    trace = traced(drawn(step, "planned"), drawn(step, "measured"))
    names = [(e["pid"], e["tid"], e["args"]["name"]) for e in trace["M"] if "name" in e["args"]]
    assert names == [
        *[(1, 0, "planned"), (1, 1, "rank 0"), (1, 2, "rank 1")],
        *[(2, 0, "measured"), (2, 1, "rank 0"), (2, 2, "rank 1")],
    ]
    found = tracks(trace["X"])
    assert {key: "".join(each["name"] for each in own) for key, own in found.items()} == dict.fromkeys(
        [(1, 1), (1, 2), (2, 1), (2, 2)], "F0B0"
    )
    waited = {"waited_us": 2500.0, "waited_for": "activation of microbatch 0 from rank 0"}
    assert found[1, 2][0] == {
        **{"ph": "X", "name": "F0", "pid": 1, "tid": 2, "cat": "forward", "ts": 2500.0, "dur": 2000.0},
        "args": {"phase": "forward", "stage": 1, "microbatch": 0, **waited},
    }
    assert found[2, 2][1]["args"] == {"phase": "backward", "stage": 1, "microbatch": 0}


def test_counters_follow_microbatches_in_flight_and_the_bytes_given() -> None:
    curve = Curve.of([(0.0, 64), (6.0, 0)])
    memory = MemoryCurves(curve, {"parameters": curve.amounts / 4, "saved": curve.amounts * 3 / 4})
    trace = traced(drawn(played(make_schedule("gpipe", 1, 2)), memory=[memory]))
    counters = [(event["name"], event["ts"], event["args"]) for event in trace["C"]]
    assert counters == [
        ("in flight, rank 0", 0.0, {"microbatches": 1}),
        ("in flight, rank 0", 1000.0, {"microbatches": 2}),
        ("in flight, rank 0", 4000.0, {"microbatches": 1}),
        ("in flight, rank 0", 6000.0, {"microbatches": 0}),
        ("memory, rank 0", 0.0, {"parameters": 16, "saved": 48}),
        ("memory, rank 0", 6000.0, {"parameters": 0, "saved": 0}),
    ]


def test_arrows_are_of_what_a_compute_sends_and_stay_in_slices_that_take_no_time() -> None:
    """Results, and weights that are lent before any compute, have none."""
    instant = dict.fromkeys(("forward", "backward_input", "backward_weight"), 0.0)
    trace = traced(drawn(played(make_schedule("1f1b", 2, 4), tied_links(1, 0), **instant)))
    assert Counter(event["name"].split()[0] for event in trace["s"]) == {"activation": 4, "gradient": 4}
    assert {event["ts"] for event in trace["s"] + trace["f"]} == {0.0}


@pytest.mark.slow
@given(TIMELINES)
def test_each_arrow_leads_from_a_slice_to_one_that_begins_later(timeline: Timeline) -> None:
    """Both ends lie inside one slice of their track, and slices do not overlap: a viewer binds no other."""
    trace = traced(drawn(timeline, "one"), drawn(timeline, "other"))
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


FIELDS = {
    "X": {"cat": str, "ts": float, "dur": float, "args": dict},
    "s": {"cat": str, "ts": float, "id": str, "bp": str},
    "f": {"cat": str, "ts": float, "id": str, "bp": str},
    "C": {"ts": float, "args": dict},
    "M": {"args": dict},
}
"""By its ``ph``, what the Trace Event Format of Chromium gives an event besides its name, pid and tid."""


def test_the_trace_keeps_to_the_trace_event_format() -> None:
    """Viewers pass over what they do not know, such as a flow without its category, without a word."""
    memory = [held((0.0, 64), (6.0, 0))] * 6
    whole = json.loads(chrome_trace([drawn(ended((3, 2, 1), 6, **EVERYTHING), memory=memory)]))
    assert whole.keys() == {"displayTimeUnit", "traceEvents"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events = whole["traceEvents"]
    assert {each["ph"] for each in events} == {*FIELDS}
    for each in events:
        fields = {"ph": str, "name": str, "pid": int, "tid": int, **FIELDS[each["ph"]]}
        assert {name: type(value) for name, value in each.items()} == fields
        assert min(each.get("ts", 0), each.get("dur", 0)) >= 0
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
        traced(drawn(timeline))
