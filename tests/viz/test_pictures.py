"""Timelines as pictures: what a reader must find in them, for small steps and for very large ones."""

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from bare_programs import lower, uniform_costs
from example_schedules import result_link

from pipec.errors import InputError
from pipec.ir import Instruction, Op, Schedule, Stage, Tail, Value
from pipec.programs.lower import bare_plan, chain_links
from pipec.programs.lower import lower as lower_plan
from pipec.programs.tail_order import with_forwards_first
from pipec.schedules import make_schedule, zb_v
from pipec.timeline.events import Event, Timeline
from pipec.timeline.simulate import simulate
from pipec.viz import timeline_svg, timeline_text
from pipec.viz.labels import NAMES, time_axis

SVG = "{http://www.w3.org/2000/svg}"


def played(schedule: Schedule, recompute: tuple[int, ...] = (), **costs: float | str) -> Timeline:
    links = (*chain_links(schedule.num_stages), result_link(schedule.num_stages - 1))
    return simulate(
        lower(schedule, links, recompute), uniform_costs(schedule.num_stages, links=links, **costs)
    )


def crowded(num_ranks: int, num_events: int) -> Timeline:
    """Each rank alternates a forward and a backward without a pause."""
    ops = (Op.FORWARD, Op.BACKWARD)
    events = [
        Event(rank, Instruction(ops[k % 2], rank, k // 2), float(k), float(k + 1))
        for rank in range(num_ranks)
        for k in range(num_events)
    ]
    return Timeline(tuple(events), (1,) * num_ranks)


def rects(svg: str) -> Counter[str | None]:
    return Counter(rect.get("class") for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"))


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def played_with_tail(num_stages: int, num_microbatches: int) -> Timeline:
    """1F1B with all forwards first, and a tail of two units."""
    schedule = make_schedule("1f1b", num_stages, num_microbatches)
    links, rows = chain_links(num_stages), Value("rows", "float32", ("b",))
    stages = [Stage(number, number, number) for number in range(num_stages)]
    stages[-1] = replace(stages[-1], tail=Tail((rows,), (rows,)))
    plan = replace(bare_plan(schedule, links), stages=tuple(stages))
    costs = uniform_costs(num_stages, links=links)
    costs = replace(costs, sync_times={(Op.TAIL, num_stages - 1, -1): 2.0})
    return simulate(lower_plan(with_forwards_first(schedule), plan), costs)


WITH_TAIL = """\
rank 0 F0 F1 F2 ···············B0─── B1─── B2───
rank 1 ···F0 F1 F2 T──── B0─── B1─── B2─── ······
       0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 units
F forward  B backward  T tail  · idle; numbers are microbatches
longest wait: rank 0, 5 units for rank 1's gradients
critical path: 7 units on rank 0, 7 units on rank 1
"""


def test_the_tail_is_drawn() -> None:
    timeline = played_with_tail(2, 3)
    assert timeline_text(timeline).split("\n", 1)[1] == WITH_TAIL
    drawn = timeline_svg(timeline)
    assert {"F0", "T"} <= {*texts(drawn)}


TIMELINE = """\
1F1B with recomputing
bubble 33.3% (40.0% if recomputing counts as idle) of span 15 units, idle 33.3% of makespan 15 units, at most 3 in flight
rank 0 F0 F1 F2 R0 ·········B0─── R1 B1─── R2 B2───
rank 1 ···F0 F1 ······B0─── F2 B1─── ···B2─── ······
rank 2 ······F0 B0─── F1 B1─── F2 B2─── ············
       0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 units
F forward  R recompute  B backward  · idle; numbers are microbatches
longest wait: rank 1, 3 units for rank 2's gradients, 1 units for rank 0's activations
critical path: 9 units on rank 0, 3 units on rank 1, 3 units on rank 2
"""  # noqa: E501


def test_text_shows_a_row_per_rank_and_a_label_per_cell() -> None:
    assert timeline_text(played(make_schedule("1f1b", 3, 3), (0,)), "1F1B with recomputing") == TIMELINE


def last_lines(timeline: Timeline) -> list[str]:
    return timeline_text(timeline).splitlines()[-2:]


def test_text_says_who_waits_for_whom_and_what_is_critical() -> None:
    """What is left after the three largest parts is told as one, unless that would be a single part."""
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


def test_text_letters_the_stages_of_a_rank() -> None:
    text = timeline_text(played(zb_v(2, 3)))
    assert "rank 1 ····Fa0 Fb0 Fa1 Fb1 Bb0 Wb0 " in text
    assert "B input gradient  W weight gradient" in text
    assert "letters a, b, ... are the stages of a rank" in text


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
    instant = uniform_costs(2, forward=0, backward_input=0, backward_weight=0)
    programs = lower(make_schedule("gpipe", 2, 2), chain_links(2))
    assert "makespan 0 units" in draw(simulate(programs, instant))


def test_the_svg_of_1f1b(golden: Callable[[str, str], None]) -> None:
    schedule = make_schedule("1f1b", 4, 8)
    svg = timeline_svg(played(schedule, message=0.25), "1F1B, 4 ranks, 8 microbatches")
    golden(svg, "timeline_1f1b.svg")


def test_svg_has_a_lane_per_rank_a_box_per_compute_and_an_arrow_per_message() -> None:
    timeline = played(make_schedule("1f1b", 4, 8), (1,), message=0.25)
    svg = timeline_svg(timeline)
    assert rects(svg) == {"card": 1, "lane": 4, "forward": 32 + 1, "backward": 32 + 1, "recompute": 8 + 1}
    arrows = Counter(path.get("class") for path in ElementTree.fromstring(svg).iter(f"{SVG}path"))
    assert (arrows["message activation"], arrows["message gradient"]) == (24 + 1, 24 + 1)
    words = texts(svg)
    assert {"rank 0", "rank 3", "F0", "B7", "R3", "forward", "recompute", "time, units"} < set(words)
    assert any(word.startswith(f"bubble {timeline.bubble_rate:.1%} (") for word in words)


def test_svg_shades_the_stages_of_a_rank() -> None:
    svg = timeline_svg(played(zb_v(2, 4)))
    assert svg.count('fill-opacity="0.55"') == 3 * 4 * 2
    assert {"Fa0", "Wb3", "lighter: a later stage of the rank"} < set(texts(svg))


def test_svg_escapes_its_title_and_drops_what_xml_cannot_hold() -> None:
    svg = timeline_svg(played(make_schedule("gpipe", 1, 1)), 'a <b> & "c"\x00\x1b')
    assert 'a <b> & "c"' in texts(svg)


def test_svg_of_very_many_boxes_is_refused() -> None:
    svg = timeline_svg(crowded(num_ranks=100, num_events=40))
    assert rects(svg)["forward"] == 100 * 20 + 1
    assert {"rank 0", "rank 2"} <= {*texts(svg)}
    assert "rank 1" not in texts(svg), "names have room"
    with pytest.raises(InputError, match=r"60,000 boxes.* draw \.html"):
        timeline_svg(crowded(num_ranks=1, num_events=60_000))


def test_svg_scales_to_its_container() -> None:
    root = ElementTree.fromstring(timeline_svg(played(make_schedule("1f1b", 2, 4))))
    assert root.get("style") == "max-width: 100%; height: auto"
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"


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
