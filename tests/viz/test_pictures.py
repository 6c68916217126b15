"""Timelines as pictures: what a reader must find in them, for small steps and for very large ones.

docs/schedules.md and docs/images/timeline.svg are pictures of whole schedules, compared word by word.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from bare_programs import lower, uniform_costs
from example_schedules import result_link
from simulated_updates import EVERYTHING, ended

from pipec.errors import InputError
from pipec.ir import Instruction, Op, Schedule, ShardingLevel
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule, zb_v
from pipec.timeline.events import Event, Timeline
from pipec.timeline.simulate import simulate
from pipec.viz import timeline_svg, timeline_text
from pipec.viz.labels import NAMES, overlap_rows, payload_description, time_axis

SVG = "{http://www.w3.org/2000/svg}"


def played(schedule: Schedule, recompute: tuple[int, ...] = (), **costs: float | str) -> Timeline:
    links = (*chain_links(schedule.num_stages), result_link(schedule.num_stages - 1))
    programs = lower(schedule, links, recompute)
    return simulate(programs, uniform_costs(schedule.num_stages, links=links, **costs))


def rects(svg: str) -> Counter[str | None]:
    return Counter(rect.get("class") for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"))


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_text_tells_recomputes_from_forwards() -> None:
    text = timeline_text(played(make_schedule("1f1b", 3, 3), (0,)), "1F1B with recomputing")
    assert text.startswith("1F1B with recomputing\nbubble 33.3% (40.0% if recomputing counts as idle)")
    assert "\nrank 0 F0 F1 F2 R0 ·········B0─── R1 B1─── R2 B2───\n" in text
    assert "\nF forward  R recompute  B backward  · idle; numbers are microbatches\n" in text


def test_the_tail_is_drawn() -> None:
    timeline = Timeline((Event(0, Instruction(Op.TAIL, 0), 0.0, 2.0),), (0,))
    assert "\nrank 0 T\n" in timeline_text(timeline)
    assert "T tail" in timeline_text(timeline)
    assert "T" in texts(timeline_svg(timeline))


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
    def crowded(num_ranks: int, num_events: int) -> Timeline:
        events = (
            Event(rank, Instruction((Op.FORWARD, Op.BACKWARD)[k % 2], rank, k // 2), float(k), k + 1.0)
            for rank in range(num_ranks)
            for k in range(num_events)
        )
        return Timeline(tuple(events), (1,) * num_ranks)

    svg = timeline_svg(crowded(num_ranks=100, num_events=40))
    assert rects(svg)["forward"] == 100 * 20 + 1
    assert {"rank 0", "rank 2"} <= {*texts(svg)}
    assert "rank 1" not in texts(svg), "names have room"
    with pytest.raises(InputError, match=r"60,000 boxes.* draw \.html"):
        timeline_svg(crowded(num_ranks=1, num_events=60_000))


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
@pytest.mark.parametrize("options", [{}, {"updates": True}, EVERYTHING])
def test_every_view_draws_every_kind_of_step(
    replicas: int | tuple[int, ...], options: dict[str, object]
) -> None:
    timeline = ended(replicas, 6, **options)
    collectives = Counter(event.instruction.op for event in timeline.events if event.is_collective)
    drawn, text = rects(timeline_svg(timeline, "a step")), timeline_text(timeline)
    for op in (Op.REDUCE_GRAD, Op.GRAD_NORM):
        assert drawn[op] == collectives[op] + (op in collectives), op
    assert "Σ0" in text
    assert ("U update" in text) is bool(options)


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
