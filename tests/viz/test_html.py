"""The interactive page, in a headless Chromium: what it shows, what it says, and how it is moved about."""

import json
import os
import re
import shutil
import subprocess
from importlib import resources
from itertools import pairwise

import numpy as np
import pytest
from bare_programs import lower, uniform_costs
from chromium import PATH
from hypothesis import given
from hypothesis import strategies as st
from page_views import (
    Open,
    color_at,
    count_color,
    drag,
    embedded,
    held,
    hover,
    lane,
    one_f_one_b,
    played,
    point,
    press,
    settle,
    steps_of,
    unpack,
    visible,
)
from simulated_updates import EVERYTHING, ended

from pipec.schedules import make_schedule, zb_v
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate
from pipec.viz import page_html
from pipec.viz.html import SCRIPTS
from pipec.viz.packed_data import Column, pack
from pipec.viz.svg import timeline_svg
from pipec.viz.terminal import timeline_text

# ---- the file ----


HOSTILE = "<!--</script ></script><script>document.body.remove()</script> {{data}} & \"'\x00"


def test_neither_title_nor_name_breaks_out_of_its_place() -> None:
    html = page_html(steps_of({HOSTILE: one_f_one_b()}), HOSTILE)
    assert "<script>document" not in html
    assert "<title>&lt;!--&lt;/script &gt;&lt;/script&gt;&lt;script&gt;" in html
    assert embedded(html)["timelines"][0]["name"] == HOSTILE


def test_the_page_is_complete_deterministic_and_loads_nothing() -> None:
    html = page_html(steps_of({"step": one_f_one_b()}), "a step")
    assert html == page_html(steps_of({"step": one_f_one_b()}), "a step")
    assert not re.search(r"https?:|\bsrc=|@import|url\(", html)
    assert not re.search(r"\{\{\w+\}\}", html)


def test_times_keep_seven_digits_of_the_longest() -> None:
    timeline = one_f_one_b(1, 1, forward=1 / 3, backward_input=1e3, unit="s")
    computes = embedded(page_html(steps_of({"step": timeline})))["timelines"][0]["computes"]
    assert computes["end"] == [0.333, 1001.333]
    assert computes["start"] == [0, 0.333]


numbers = st.lists(st.integers(-(2**46), 2**46) | st.integers(-300, 300), max_size=40)


@given(numbers, st.sampled_from([1, 10.0, 1e7]))
def test_columns_come_back(values: list[int], divisor: float) -> None:
    packed = pack({"name": "a <b>", "deep": [{"column": "no"}, Column(np.array(values, np.int64), divisor)]})
    assert unpack(packed)["name"] == "a <b>"
    assert unpack(packed)["deep"][1] == [value / divisor for value in values]


def test_the_page_reads_what_python_packed(open_page: Open) -> None:
    page = open_page({"1f1b": one_f_one_b()})
    rows = [[0, 1, -1, 127, -128], [300, -300, 0, 40_000], [2**40, 2**40 - 1, -5, 2**46], [], [7] * 9]
    times = Column(np.array([3333, 10013330]), 1e4)
    code = """async (text) => {
        const { rows, times } = await unpack(text);
        return [rows.map((row) => [...row]), [...times]];
    }"""
    read = page.evaluate(code, pack({"rows": [Column.of(row) for row in rows], "times": times}))
    assert read == [rows, [0.3333, 1001.333]]


PAGE = resources.files("pipec.viz").joinpath("page")
NPX = shutil.which("npx", path=PATH)


def test_every_script_is_checked_in_the_order_in_which_it_runs() -> None:
    listed = json.loads(PAGE.joinpath("tsconfig.json").read_text())["files"]
    assert listed == ["data.d.ts", *(f"{name}.js" for name in SCRIPTS)]


@pytest.mark.slow
@pytest.mark.skipif(NPX is None, reason="no `npx`: install node to check types")
def test_types_of_the_scripts_fit() -> None:
    """Under TypeScript's checker, which needs no build: the types are in comments."""

    def check(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(NPX), "--yes", "--package", "typescript@5.9.3", "tsc", *arguments]
        environment = {**os.environ, "PATH": PATH}
        return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)

    if check("--version").returncode:
        pytest.skip("npx cannot fetch typescript")
    made = check("-p", str(PAGE))
    assert made.returncode == 0, made.stdout


# ---- what it shows ----


@pytest.mark.parametrize(
    "timeline", [Timeline((), (0, 0)), one_f_one_b(1, 1, forward=0, backward_input=0, backward_weight=0)]
)
def test_an_empty_timeline_is_shown(open_page: Open, timeline: Timeline) -> None:
    page = open_page({"empty": timeline})
    press(page, "critical")
    press(page, "in")
    assert "bubble 0.0%" in page.locator("#canvas").get_attribute("aria-label")


def test_every_compute_is_drawn_where_it_runs_in_the_dark_and_the_light(open_page: Open) -> None:
    timeline = one_f_one_b()
    page = open_page({"1f1b": timeline}, scheme="dark")
    assert color_at(page, "[2, 2]") == "#0d1117"
    assert color_at(page, lane(3, 1.0, part="y + 3")) == "#1c2129"
    page.emulate_media(color_scheme="light")
    settle(page)
    assert color_at(page, "[2, 2]") == "#ffffff"
    assert color_at(page, lane(3, 1.0, part="y + 3")) == "#f1f3f5"
    for event in timeline.computes:
        at = lane(event.rank, (event.start + event.end) / 2, part="y + 3")
        expected = {"forward": "#8cb8f2", "backward": "#f5b26b"}[event.instruction.op]
        assert color_at(page, at) == expected, event


def test_the_critical_path_is_marked_on_demand(open_page: Open) -> None:
    page = open_page({"1f1b": one_f_one_b()})
    assert count_color(page, "critical") == 0
    press(page, "critical")
    assert page.locator("#critical").get_attribute("aria-pressed") == "true"
    assert count_color(page, "critical") > 500
    assert color_at(page, lane(0, 0.5, part="y + 3")) == "#8cb8f2"
    assert color_at(page, lane(0, 1.5, part="y + 3")) not in ("#8cb8f2", "#f1f3f5")
    page.keyboard.press("c")
    settle(page)
    assert count_color(page, "critical") == 0


def test_a_large_step_is_drawn_in_as_many_boxes_as_are_visible(open_page: Open) -> None:
    page = open_page({"1f1b": one_f_one_b(4, 512)})
    code = """() => {
        const brush = { place: x, from: view.start, right: GUTTER + laneWidth() };
        const { full } = gatherBoxes([timelines[0].lanes[2]], brush);
        const sum = (rects) => rects.reduce((total, each, k) => total + (k % 4 === 2 ? each : 0), 0);
        return [...full].map(([color, rects]) => [color, rects.length / 4, sum(rects) / scale()]);
    }"""
    drawn = {color: (count, time) for color, count, time in page.evaluate(code)}
    assert sum(count for count, _ in drawn.values()) <= 2 * page.evaluate("() => laneWidth()") / 3
    assert drawn["rgb(140,184,242)"][1] == pytest.approx(512, rel=0.05)
    assert drawn["rgb(245,178,107)"][1] == pytest.approx(1024, rel=0.05)
    assert page.locator("#range").inner_text().endswith("; zoom in for messages")
    page.evaluate("() => { show(100, 110); redraw(); }")
    settle(page)
    assert page.evaluate("() => arrows(timelines[0]).length") > 10
    assert sum(count for _, count, _ in page.evaluate(code)) < 12


BAND = "timelines[0].lanes[0].bandY - timelines[0].lanes[0].y + y + 2"
"""How far below the top of its lane the collectives of a rank are."""


def test_collectives_have_a_band_below_the_lane_of_their_rank(open_page: Open) -> None:
    timeline = ended(2, 4, **EVERYTHING)
    page = open_page({"2": timeline})
    band = {"reduce_grad": "#e39bb6", "unshard": "#7fc4c4", "grad_norm": "#b9b0a2"}
    for event in timeline.overlapped:
        at = lane(event.rank, event.start + 0.1, part=BAND)
        assert color_at(page, at) == band[event.instruction.op], event
    update = next(event for event in timeline.blocking if event.instruction.op == "update")
    assert color_at(page, lane(update.rank, update.start + 0.1, part="y + 3")) == "#f2d45c"
    words = page.locator("#legend").inner_text()
    for each in ("gradient reduction", "parameter all-gather", "update", "gradient norm"):
        assert each in words


def test_replicas_of_a_stage_are_named_and_stand_together(open_page: Open) -> None:
    page = open_page({"3-2-1": ended((3, 2, 1), 6, updates=True)})
    names = page.evaluate("() => timelines[0].names")
    assert names[3:] == ["rank 3, stage 1, 1 of 2", "rank 4, stage 1, 2 of 2", "rank 5, stage 2"]
    tops = page.evaluate("() => timelines[0].lanes.map(({y}) => y)")
    gaps = [below - above for above, below in pairwise(tops)]
    assert gaps == pytest.approx([gaps[0], gaps[0], gaps[0] + 12, gaps[0], gaps[0] + 12])
    widest = "() => { ctx.font = `400 12px ${FONT}`; return ctx.measureText(timelines[0].names[0]).width; }"
    assert page.evaluate(widest) + 10 < page.evaluate("() => GUTTER")


# ---- what it says ----


def test_an_update_and_a_collective_say_what_was_waited_for_and_who_came_last(open_page: Open) -> None:
    page = open_page({"3-2-1": ended((3, 2, 1), 6, updates=True)})
    assert hover(page, lane(0, 24.5, part=BAND)) == [
        "gradient reduction",
        "rank 0, replica 1 of 3",
        "bucket 0 of stage 0, 768 B: 0.q and 2 others",
        "between ranks 0, 1, 2",
        "24 to 25.5 units, took 1.5 units",
        "rank 2 came last, at 24 units",
    ]
    assert hover(page, lane(2, 24.5, part=BAND))[-1] == "no rank came later"
    waited = "the rank waited 7.5 units for the gradient reduction, to which rank 2 came last, at 24 units"
    update = ["update", "stage 0, rank 0, replica 1 of 3", "25.5 to 26 units, took 0.5 units", waited]
    assert hover(page, lane(0, 25.7)) == update
    idle = ["idle", "rank 0, replica 1 of 3", "until the update, stage 0", waited]
    assert hover(page, lane(0, 24.5)) == idle


def test_the_sum_of_the_counts_of_local_batches_has_its_place_in_every_picture(open_page: Open) -> None:
    timeline = ended((3, 2, 1), 6, replicas_pass_own_rows=True, count_stages=(0,))
    page = open_page({"3-2-1": timeline})
    told = ["sum of counts", "rank 0, replica 1 of 3", "batch counts of stage 0", "between ranks 0, 1, 2"]
    assert hover(page, lane(0, 0.5, part=BAND))[:4] == told
    assert "the rank waited 0.75 units for the sum of counts" in hover(page, lane(0, 0.9))[-1]
    assert "sum of counts" in page.locator("#legend").inner_text()
    assert color_at(page, lane(0, 0.1, part=BAND)) == "#d6cd8b"
    assert ">sum of counts</text>" in timeline_svg(timeline)
    assert "C sum of counts" in timeline_text(timeline)


def test_a_rank_that_is_left_with_a_sum_says_so(open_page: Open) -> None:
    timeline = ended((2, 1), 3)
    page = open_page({"2-1": timeline})
    assert hover(page, lane(1, timeline.makespan - 0.5))[2].startswith(
        "in the gradient reduction, to which rank 0"
    )
    assert hover(page, lane(2, timeline.makespan - 0.5))[2] == "nothing is left to compute"


def test_computes_idle_time_and_messages_say_when_and_what_was_waited_for(open_page: Open) -> None:
    page = open_page({"1f1b": one_f_one_b()})
    assert hover(page, lane(2, 3.0)) == [
        "forward of microbatch 0",
        "stage 2, rank 2",
        "2.5 to 3.5 units, took 1 units",
        "the rank waited 2.5 units for the activation of microbatch 0 from rank 1, stage 1: "
        "sent at 2.25 units, there at 2.5 units",
    ]
    assert hover(page, lane(0, 1.5))[-1] == "the rank did not wait before it"
    assert hover(page, "[2, 2]") == []
    assert hover(page, lane(0, 8.0)) == [
        "idle",
        "rank 0",
        "until the backward of microbatch 0, stage 0",
        "the rank waited 7.5 units for the gradient of microbatch 0 from rank 1, stage 1: "
        "sent at 11.25 units, there at 11.5 units",
    ]
    assert hover(page, lane(3, 36.5)) == ["idle", "rank 3", "nothing is left to compute"]
    middle = "(([fx, fy, tx, ty]) => [(fx + tx) / 2, (fy + ty) / 2 - view.top])(arrowEnds(timelines[0], 0))"
    assert hover(page, middle) == [
        "activation of microbatch 0",
        "rank 0 to rank 1",
        "from stage 0 to stage 1",
        "sent at 1 units, there at 1.25 units, under way for 0.25 units",
    ]
    press(page, "messages")
    assert hover(page, middle)[:1] != ["activation of microbatch 0"]
    assert page.evaluate("() => arrows(timelines[0]).length") == 0


def test_a_curve_says_what_is_held(open_page: Open) -> None:
    memory = {"1f1b": [held((0.0, 3e6), (20.0, 1e9))] * 4}
    page = open_page({"1f1b": one_f_one_b()}, memory=memory)
    words = hover(page, lane(0, 2.5, part="curveY + 3"))
    assert words[:2] == ["3 in flight", "rank 0"]
    assert words[2].endswith("; at most 4 in flight")
    page.get_by_role("tab", name="memory").click()
    settle(page)
    assert hover(page, lane(0, 2.5, part="curveY + 3")) == [
        "3 MB",
        "rank 0, at 2.5 units",
        "saved: 3 MB",
        "microbatches in flight, stage 0: 0, 1, 2",
        "peak: 1 GB at 20 units",
    ]


def test_a_compute_is_compared_with_the_same_in_the_other_timeline(open_page: Open) -> None:
    costs = {"backward_input": 2e-3, "backward_weight": 1e-3, "unit": "s"}
    timelines = {
        name: simulate(lower(make_schedule("gpipe", 1, 2), ()), uniform_costs(1, forward=forward, **costs))
        for name, forward in (("planned", 4e-3), ("measured", 5e-3))
    }
    page = open_page(timelines)
    assert hover(page, lane(0, 6e-3, timeline=1)) == [
        "forward of microbatch 1",
        "stage 0, rank 0, measured",
        "5 to 10 ms, took 5 ms",
        "the rank did not wait before it",
        "planned: 4 to 8 ms, took 4 ms; this one takes 25% longer",
    ]
    assert page.evaluate("() => [20, 2, 1.4, 0.6, 0.05].map(ratioWords)") == [
        "20 times as long",
        "2 times as long",
        "40% longer",
        "40% shorter",
        "only 5% as long",
    ]


# ---- how it is moved about ----


def test_wheel_keys_and_drags_zoom_and_pan(open_page: Open) -> None:
    page = open_page({"1f1b": one_f_one_b()})
    assert visible(page) == (0, 37)
    page.mouse.move(*point(page, "[x(10), 300]"))
    before = page.evaluate("() => x(10)")
    page.mouse.wheel(0, -600)
    settle(page)
    start, end = visible(page)
    assert 5 < start < 10 < end < 24
    assert page.evaluate("() => x(10)") == pytest.approx(before, abs=1.5)
    page.mouse.wheel(300, 0)
    settle(page)
    assert visible(page)[0] > start
    page.mouse.dblclick(*point(page, "[200, 300]"))
    settle(page)
    assert visible(page) == (0, 37)
    for key in "+++":
        page.keyboard.press(key)
    settle(page)
    start, end = visible(page)
    assert end - start == pytest.approx(37 / 1.5**3, rel=0.01)
    page.keyboard.press("ArrowRight")
    settle(page)
    assert visible(page)[0] > start
    page.keyboard.press("0")
    settle(page)
    assert visible(page) == (0, 37)
    page.evaluate("() => show(10, 20)")
    drag(page, "[x(15), 300]", "[x(12), 300]")
    assert visible(page) == pytest.approx((13, 23), abs=0.1)
    drag(page, "[x(17), 10]", "[x(16), 10]")
    assert visible(page) == pytest.approx((16, 17), abs=0.1)


def test_more_ranks_than_fit_are_scrolled_to(open_page: Open) -> None:
    page = open_page({"1f1b": one_f_one_b(40, 4)})
    drag(page, "[300, 500]", "[300, 250]")
    assert page.evaluate("() => view.top") == 250
    page.mouse.move(*point(page, "[20, 300]"))
    page.mouse.wheel(0, 5000)
    settle(page)
    lowest = page.evaluate("() => { const {y, box} = timelines[0].lanes[39]; return y + box - view.top; }")
    assert lowest <= page.locator("#canvas").bounding_box()["height"]
    assert hover(page, lane(39, 49.5))[:2] == ["forward of microbatch 0", "stage 39, rank 39"]


def test_lanes_of_several_stages_are_shaded_and_lettered(open_page: Open) -> None:
    page = open_page({"zb-v": played(zb_v(2, 4))})
    assert "lighter: later stage" in page.locator("#legend").inner_text()
    assert page.evaluate("() => [0, 1].map((i) => boxLabel(timelines[0], timelines[0].first[1] + i))") == [
        "Fa0",
        "Fb0",
    ]
    shades = [color_at(page, lane(1, time, part="y + 3")) for time in (1.5, 2.5)]
    assert shades == ["#8cb8f2", "#c6dcf9"]


@pytest.mark.parametrize("width", [760, 1010, 1250])
def test_nothing_is_cut_off_in_a_narrow_window(open_page: Open, width: int) -> None:
    """Buttons and legend fold; hints stay within reach; a long summary ends in dots."""
    timeline = played(zb_v(4, 8))
    page = open_page({"zb-v": timeline, "again": timeline}, memory={"zb-v": [held((0.0, 1e9))] * 4})
    page.set_viewport_size({"width": width, "height": 500})
    settle(page)
    boxes = page.locator("#tools > button, #legend > span, #range, #help > *").evaluate_all(
        """(all) => all.map((one) => one.getBoundingClientRect()).filter(({ width }) => width)
            .map(({ left, right, bottom }) => [left, right, bottom])"""
    )
    assert all(left >= 0 and right <= width and bottom <= 500 for left, right, bottom in boxes)
    assert page.evaluate("() => document.documentElement.scrollWidth") == width
    assert page.locator("#keysHint").is_visible()
    page.locator("#openKeys").click()
    assert "next and previous cell" in page.locator("dialog").inner_text()
    page.locator("#closeKeys").click()
    words = page.evaluate("() => shortened(timelines[0].summary, 200)")
    assert words.endswith("…")
    assert page.evaluate("(words) => ctx.measureText(words).width", words) <= 200


def test_versions_are_told_where_there_is_no_flush(open_page: Open) -> None:
    timeline = played(make_schedule("pipedream", 3, 6))
    page = open_page({"pipedream": timeline})
    forward = next(e for e in timeline.computes.of_rank(0) if e.instruction.microbatch == 4)
    card = hover(page, lane(0, (forward.start + forward.end) / 2))
    assert card[0] == "forward of microbatch 4, reads version 2 of the weights"


def test_a_page_of_very_many_events_has_the_messages_that_were_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeline = one_f_one_b()
    whole = embedded(page_html(steps_of({"planned": timeline})))["timelines"][0]
    monkeypatch.setattr("pipec.viz.page_data.MOST_EVENTS", len(timeline.events) - 1)
    (few,) = embedded(page_html(steps_of({"planned": timeline})))["timelines"]
    assert few["computes"]["start"] == whole["computes"]["start"]
    assert 0 < len(few["messages"]["rank"]) < len(whole["messages"]["rank"])
    assert (few["allMessages"], whole["allMessages"]) == (False, True)
    waited = [k for k, cause in enumerate(whole["computes"]["cause"]) if cause >= 0]
    assert [few["computes"]["cause"][k] >= 0 for k in waited] == [True] * len(waited)
