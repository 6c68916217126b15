"""The interactive page, in a headless Chromium: what it shows and says, and how a visitor moves about."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib import resources
from itertools import pairwise
from math import nan
from pathlib import Path

import numpy as np
import pytest
import torch
from bare_programs import lower, uniform_costs
from chromium import CHROMIUM, PATH
from page_views import embedded
from playwright.sync_api import Browser, Page, sync_playwright
from simulated_steps import COUNTED, EVERYTHING, drawn, ended, held, one_f_one_b, played
from torch import nn

import pipec
from pipec.drawn_artifacts import trace_steps
from pipec.ir import Op
from pipec.pipeline import Pipeline
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule, zb_v
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate
from pipec.timeline.trace import Trace
from pipec.viz import DrawnPipeline, DrawnStep, page_html
from pipec.viz.html import SCRIPTS
from pipec.viz.packed_data import Column, pack
from pipec.viz.page_data import steps_data

# ---- the file ----

HOSTILE = "<!--</script ></script><script>document.body.remove()</script> {{data}} & \"'\x00"


def test_the_page_is_deterministic_and_neither_title_nor_name_breaks_out_of_its_place() -> None:
    html, again = (page_html([drawn(one_f_one_b(), HOSTILE)], HOSTILE) for _ in range(2))
    assert html == again
    assert "<script>document" not in html
    assert "<title>&lt;!--&lt;/script &gt;&lt;/script&gt;&lt;script&gt;" in html
    assert embedded(html)["timelines"][0]["name"] == HOSTILE


def test_times_keep_seven_digits_of_the_longest() -> None:
    timeline = one_f_one_b(1, 1, forward=1 / 3, backward_input=1e3, unit="s")
    columns = [steps_data([drawn(timeline)])[0]["computes"][name] for name in ("start", "end")]
    times = [(column.numbers / column.divisor).tolist() for column in columns]
    assert times == [[0, 0.333], [0.333, 1001.333]]


def test_a_page_of_very_many_events_has_the_messages_that_were_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeline = one_f_one_b()
    (whole,) = steps_data([drawn(timeline)])
    monkeypatch.setattr("pipec.viz.page_data.MOST_EVENTS", len(timeline.events) - 1)
    (few,) = steps_data([drawn(timeline)])
    assert (few["allMessages"], whole["allMessages"]) == (False, True)
    assert few["computes"]["start"].numbers.tolist() == whole["computes"]["start"].numbers.tolist()
    assert 0 < few["messages"]["rank"].numbers.size < whole["messages"]["rank"].numbers.size
    waited = [each["computes"]["cause"].numbers >= 0 for each in (few, whole)]
    assert waited[0].tolist() == waited[1].tolist()


PAGE = resources.files("pipec.viz").joinpath("page")
NPX = shutil.which("npx", path=PATH)


def test_every_script_is_checked_in_the_order_in_which_it_runs() -> None:
    listed = json.loads(PAGE.joinpath("tsconfig.json").read_text())["files"]
    assert listed == ["data.d.ts", *(f"{name}.js" for name in SCRIPTS)]


@pytest.mark.slow
@pytest.mark.skipif(NPX is None, reason="no `npx`: install node to check types")
def test_types_of_the_scripts_fit() -> None:
    """Under TypeScript's checker, which needs no build: the types are in comments."""
    command = [str(NPX), "--yes", "--package", "typescript@5.9.3", "tsc", "-p", str(PAGE)]
    environment = {**os.environ, "PATH": PATH}
    made = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert "error TS" not in made.stdout, made.stdout
    if made.returncode:
        pytest.skip(f"npx cannot fetch typescript: {made.stderr}")


# ---- a visitor ----

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None and "PIPEC_REQUIRE_CHROMIUM" not in os.environ:  # with that they fail
        pytest.skip("no `chromium`: `make setup` fetches one for Linux on x86-64")
    assert CHROMIUM, "there is no Chromium: `make setup` could not install one"
    with sync_playwright() as playwright:
        # Without its sandbox Chromium also runs as root, as in a container.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Open steps from a file; what the page complains of, or asks for beyond itself, fails the test."""
    complaints: list[str] = []

    def open_(
        *steps: Timeline | DrawnStep,
        pipeline: DrawnPipeline | None = None,
        scheme: str = "light",
        address: str = "tab=timeline",
    ) -> Page:
        path = tmp_path / "timeline.html"
        shown = [drawn(each) if isinstance(each, Timeline) else each for each in steps]
        path.write_text(page_html(shown, pipeline=pipeline), encoding="utf-8")
        page = browser.new_page(viewport={"width": 1200, "height": 700}, color_scheme=scheme)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(f"asked for {request.url}"))
        page.goto(f"{path.as_uri()}#{address}")
        page.wait_for_function("document.body.dataset.ready")
        assert complaints.pop(0).startswith(f"asked for {path.as_uri()}")
        settle(page)
        return page

    yield open_
    assert complaints == []
    for context in browser.contexts:
        context.close()


def settle(page: Page) -> None:
    """Wait until what was asked for is drawn."""
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def press(page: Page, button: str) -> None:
    page.locator(f"#{button}").click()
    settle(page)


def point(page: Page, place: str) -> tuple[float, float]:
    """Where on the screen a place on the canvas is; ``place`` is JavaScript for [x, y]."""
    px, py = page.evaluate(f"() => {place}")
    box = page.locator("#canvas").bounding_box()
    assert box
    return box["x"] + px, box["y"] + py


def lane(rank: int, time: float, timeline: int = 0, part: str = "y + 3") -> str:
    """A place in the lane of a rank; ``part`` is how far down, from the names of its measures."""
    measures = "{y, box, bandY, curveY}"
    return f"(({measures}) => [x({time}), {part} - view.top])(timelines[{timeline}].lanes[{rank}])"


def hover(page: Page, place: str) -> list[str]:
    """What the card says when the pointer is there; nothing if it is hidden."""
    page.mouse.move(*point(page, place))
    settle(page)
    return [] if page.locator("#card").is_hidden() else page.locator("#card > *").all_inner_texts()


def details(page: Page) -> list[str]:
    """What the page says of the selected thing."""
    return page.locator("#details > b, #details > p").all_inner_texts()


def drag(page: Page, start: str, to: str) -> None:
    page.mouse.move(*point(page, start))
    page.mouse.down()
    page.mouse.move(*point(page, to), steps=4)
    page.mouse.up()
    settle(page)


def visible(page: Page) -> list[float]:
    """The range of time that is shown."""
    settle(page)
    return page.evaluate("() => [view.start, view.end]")


def color_at(page: Page, place: str) -> str:
    """The colour drawn at a place, as ``#rrggbb``."""
    # Reading the canvas itself would make Chromium draw it differently from then on.
    pixel = page.evaluate(f"""() => {{
        const copy = new OffscreenCanvas(canvas.width, canvas.height);
        const pen = copy.getContext("2d", {{ willReadFrequently: true }});
        pen.drawImage(canvas, 0, 0);
        return [...pen.getImageData(...{place}.map(Math.round), 1, 1).data.slice(0, 3)];
    }}""")
    return "#{:02x}{:02x}{:02x}".format(*pixel)


def test_the_page_reads_what_python_packed(open_page: Open) -> None:
    """Numbers at both ends of each width."""
    page = open_page(one_f_one_b())
    rows = [[], [7] * 9, *([2**k - 1, -1, -(2**k), 0] for k in range(47))]
    times = Column(np.array([3333, 10013330]), 1e4)
    code = """async (text) => {
        const { rows, times } = await unpack(text);
        return [rows.map((row) => [...row]), [...times]];
    }"""
    read = page.evaluate(code, pack({"rows": [Column.of(row) for row in rows], "times": times}))
    assert read == [rows, [0.3333, 1001.333]]


# ---- what the timeline shows ----


def test_empty_timelines_are_shown(open_page: Open) -> None:
    instant = one_f_one_b(1, 1, forward=0, backward_input=0, backward_weight=0)
    page = open_page(Timeline((), (0, 0)), instant)
    press(page, "critical")
    press(page, "in")
    assert page.locator("#canvas").get_attribute("aria-label").count("bubble 0.0%") == 2


def test_every_compute_is_drawn_where_it_runs_in_the_dark_and_the_light(open_page: Open) -> None:
    timeline = one_f_one_b()
    page = open_page(timeline, scheme="dark")
    assert color_at(page, "[2, 2]") == "#0d1117"
    assert color_at(page, lane(3, 1.0)) == "#1c2129"
    page.emulate_media(color_scheme="light")
    settle(page)
    assert color_at(page, "[2, 2]") == "#ffffff"
    assert color_at(page, lane(3, 1.0)) == "#f1f3f5"
    for event in timeline.computes:
        expected = {"forward": "#8cb8f2", "backward": "#f5b26b"}[event.instruction.op]
        assert color_at(page, lane(event.rank, (event.start + event.end) / 2)) == expected, event


def test_the_critical_path_is_marked_on_demand(open_page: Open) -> None:
    page = open_page(one_f_one_b())

    def looks() -> list[str]:
        return [
            color_at(page, lane(0, time, part=part)) for time in (0.5, 1.5) for part in ("y+3", "y+box-1")
        ]

    plain = looks()
    assert plain == ["#8cb8f2"] * 4
    press(page, "critical")
    assert page.locator("#critical").get_attribute("aria-pressed") == "true"
    on_path, mark, *others = looks()
    assert (on_path, mark) == ("#8cb8f2", page.evaluate("() => colors.critical"))
    assert not {*others} & {on_path, mark, "#f1f3f5"}, "cells beside the path are pale"
    page.keyboard.press("c")
    settle(page)
    assert looks() == plain


def test_a_large_step_is_drawn_in_as_many_boxes_as_are_visible(open_page: Open) -> None:
    page = open_page(one_f_one_b(4, 512))
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


def test_collectives_have_a_band_below_the_lane_of_their_rank(open_page: Open) -> None:
    timeline = ended(2, 4, **EVERYTHING)
    page = open_page(timeline)
    band = {"reduce_grad": "#e39bb6", "unshard": "#7fc4c4", "grad_norm": "#b9b0a2"}
    for event in timeline.overlapped:
        at = lane(event.rank, event.start + 0.1, part="bandY + 2")
        assert color_at(page, at) == band[event.instruction.op], event
    update = next(event for event in timeline.blocking if event.instruction.op == "update")
    assert color_at(page, lane(update.rank, update.start + 0.1)) == "#f2d45c"
    words = page.locator("#legend").inner_text()
    for each in ("gradient reduction", "parameter all-gather", "update", "gradient norm"):
        assert each in words


def test_lanes_of_several_stages_are_shaded_and_lettered(open_page: Open) -> None:
    page = open_page(played(zb_v(2, 4)))
    assert "lighter: later stage" in page.locator("#legend").inner_text()
    labels = page.evaluate("() => [0, 1].map((i) => boxLabel(timelines[0], timelines[0].first[1] + i))")
    assert labels == ["Fa0", "Fb0"]
    assert [color_at(page, lane(1, time)) for time in (1.5, 2.5)] == ["#8cb8f2", "#c6dcf9"]


def test_replicas_of_a_stage_are_named_and_stand_together(open_page: Open) -> None:
    page = open_page(ended((3, 2, 1), 6, updates=True))
    names = page.evaluate("() => timelines[0].names")
    assert names[3:] == ["rank 3, stage 1, 1 of 2", "rank 4, stage 1, 2 of 2", "rank 5, stage 2"]
    tops = page.evaluate("() => timelines[0].lanes.map(({y}) => y)")
    gaps = [below - above for above, below in pairwise(tops)]
    assert gaps == pytest.approx([gaps[0], gaps[0], gaps[0] + 12, gaps[0], gaps[0] + 12])
    widest = "() => { ctx.font = `400 12px ${FONT}`; return ctx.measureText(timelines[0].names[0]).width; }"
    assert page.evaluate(widest) + 10 < page.evaluate("() => GUTTER")


# ---- what it says ----


def test_computes_idle_time_and_messages_say_when_and_what_was_waited_for(open_page: Open) -> None:
    page = open_page(one_f_one_b())
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


def test_an_update_and_a_collective_say_what_was_waited_for_and_who_came_last(open_page: Open) -> None:
    page = open_page(ended((3, 2, 1), 6, updates=True))
    assert hover(page, lane(0, 24.5, part="bandY + 2")) == [
        "gradient reduction",
        "rank 0, replica 1 of 3",
        "bucket 0 of stage 0, 768 B: 0.q and 2 others",
        "between ranks 0, 1, 2",
        "24 to 25.5 units, took 1.5 units",
        "rank 2 came last, at 24 units",
    ]
    assert hover(page, lane(2, 24.5, part="bandY + 2"))[-1] == "no rank came later"
    waited = "the rank waited 7.5 units for the gradient reduction, to which rank 2 came last, at 24 units"
    update = ["update", "stage 0, rank 0, replica 1 of 3", "25.5 to 26 units, took 0.5 units", waited]
    assert hover(page, lane(0, 25.7)) == update
    idle = ["idle", "rank 0, replica 1 of 3", "until the update, stage 0", waited]
    assert hover(page, lane(0, 24.5)) == idle


def test_a_rank_that_is_left_with_a_sum_says_so(open_page: Open) -> None:
    timeline = ended((2, 1), 3)
    page = open_page(timeline)
    late = timeline.makespan - 0.5
    assert hover(page, lane(1, late))[2].startswith("in the gradient reduction, to which rank 0")
    assert hover(page, lane(2, late))[2] == "nothing is left to compute"


def test_the_sum_of_the_counts_of_local_batches_has_its_place(open_page: Open) -> None:
    page = open_page(ended((3, 2, 1), 6, **COUNTED))
    told = ["sum of counts", "rank 0, replica 1 of 3", "batch counts of stage 0", "between ranks 0, 1, 2"]
    assert hover(page, lane(0, 0.5, part="bandY + 2"))[:4] == told
    assert "the rank waited 0.75 units for the sum of counts" in hover(page, lane(0, 0.9))[-1]
    assert "sum of counts" in page.locator("#legend").inner_text()
    assert color_at(page, lane(0, 0.1, part="bandY + 2")) == "#d6cd8b"


def test_a_forward_of_a_stream_says_which_version_it_reads(open_page: Open) -> None:
    timeline = played(make_schedule("pipedream", 3, 6))
    forward = next(e for e in timeline.computes.of_rank(0) if e.instruction.microbatch == 4)
    card = hover(open_page(timeline), lane(0, (forward.start + forward.end) / 2))
    assert card[0] == "forward of microbatch 4, reads version 2 of the weights"


def test_a_curve_tells_microbatches_and_bytes(open_page: Open) -> None:
    page = open_page(drawn(one_f_one_b(), memory=[held((0.0, 3e6), (20.0, 1e9))] * 4))
    words = hover(page, lane(0, 2.5, part="curveY + 3"))
    assert words[:2] == ["3 in flight", "rank 0"]
    assert words[2].endswith("; at most 4 in flight")
    press(page, "tab-memory")
    assert hover(page, lane(0, 2.5, part="curveY + 3")) == [
        "3 MB",
        "rank 0, at 2.5 units",
        "saved: 3 MB",
        "microbatches in flight, stage 0: 0, 1, 2",
        "peak: 1 GB at 20 units",
    ]


def test_a_compute_is_compared_with_the_same_in_the_other_timeline(open_page: Open) -> None:
    costs = {"backward_input": 2e-3, "backward_weight": 1e-3, "unit": "s"}
    planned, measured = (
        played(make_schedule("gpipe", 1, 2), forward=forward, **costs) for forward in (4e-3, 5e-3)
    )
    page = open_page(drawn(planned, "planned"), drawn(measured, "measured"))
    assert hover(page, lane(0, 6e-3, timeline=1)) == [
        "forward of microbatch 1",
        "stage 0, rank 0, measured",
        "5 to 10 ms, took 5 ms",
        "the rank did not wait before it",
        "planned: 4 to 8 ms, took 4 ms; this one takes 25% longer",
    ]
    words = page.evaluate("() => [20, 2, 1.4, 0.6, 0.05].map(ratioWords)")
    assert words == ["20 times as long", "2 times as long", "40% longer", "40% shorter", "only 5% as long"]


def test_what_a_plan_counts_for_the_host_is_told(open_page: Open) -> None:
    timeline = one_f_one_b(2, 2)
    later = tuple(replace(event, start=event.start + 2, end=event.end + 2) for event in timeline.events)
    late = Timeline(later, timeline.peak_in_flight, timeline.unit)
    page = open_page(DrawnStep("1f1b", 2, late, host_seconds=2.0))
    assert hover(page, lane(0, 1.0))[3] == (
        "the plan counts 2 units on the host before the first instruction: arguments are checked and compared"
    )
    assert "hatched: host" in page.locator("#legend").inner_text()
    assert page.evaluate("() => sumsOf(timelines[0]).map(({ host }) => host)") == [2, 2]


# ---- how it is moved about ----


def test_wheel_keys_and_drags_zoom_and_pan(open_page: Open) -> None:
    page = open_page(one_f_one_b())
    assert page.locator("#range").inner_text().startswith("0 to 37 units")
    page.mouse.move(*point(page, "[x(10), 300]"))
    before = page.evaluate("() => x(10)")
    page.mouse.wheel(0, -600)
    start, end = visible(page)
    assert 5 < start < 10 < end < 24
    assert page.evaluate("() => x(10)") == pytest.approx(before, abs=1.5)
    page.mouse.wheel(300, 0)
    assert visible(page)[0] > start
    page.mouse.dblclick(*point(page, "[200, 300]"))
    assert visible(page) == [0, 37]
    for key in "+++":
        page.keyboard.press(key)
    start, end = visible(page)
    assert end - start == pytest.approx(37 / 1.5**3, rel=0.01)
    page.keyboard.press("ArrowRight")
    assert visible(page)[0] > start
    page.keyboard.press("0")
    assert visible(page) == [0, 37]
    page.evaluate("() => show(10, 20)")
    drag(page, "[x(15), 300]", "[x(12), 300]")
    assert visible(page) == pytest.approx([13, 23], abs=0.1)
    drag(page, "[x(17), 10]", "[x(16), 10]")
    assert visible(page) == pytest.approx([16, 17], abs=0.1)
    assert re.match(r"1[56][\d.]* to 1[67][\d.]* units of 37 units", page.locator("#range").inner_text())


def test_more_ranks_than_fit_are_scrolled_to(open_page: Open) -> None:
    page = open_page(one_f_one_b(40, 4))
    drag(page, "[300, 500]", "[300, 250]")
    assert page.evaluate("() => view.top") == 250
    page.mouse.move(*point(page, "[20, 300]"))
    page.mouse.wheel(0, 5000)
    settle(page)
    lowest = page.evaluate("() => { const {y, box} = timelines[0].lanes[39]; return y + box - view.top; }")
    assert lowest <= page.locator("#canvas").bounding_box()["height"]
    assert hover(page, lane(39, 49.5))[:2] == ["forward of microbatch 0", "stage 39, rank 39"]


def test_of_very_many_ranks_all_are_in_view_and_enter_goes_from_match_to_match(open_page: Open) -> None:
    page = open_page(one_f_one_b(200, 8))
    last = "() => { const { y, pitch } = timelines[0].lanes[199]; return y + pitch <= page.height; }"
    assert page.evaluate(last)
    page.keyboard.press("/")
    page.keyboard.type("rank 100 mb 5")
    page.keyboard.press("Enter")
    settle(page)
    assert details(page)[:2] == ["forward of microbatch 5", "stage 100, rank 100"]
    pitch, width = page.evaluate("() => [timelines[0].lanes[100].pitch, scale()]")
    assert pitch >= page.evaluate("() => LEAST_ROOMY")
    assert width > 20
    page.keyboard.press("Enter")
    assert details(page)[0] == "backward of microbatch 5"
    assert page.locator("#found").inner_text() == "2 of 2"
    press(page, "fit")
    assert page.evaluate(last)


def test_a_picked_range_shows_sums_by_rank_and_kind(open_page: Open) -> None:
    page = open_page(one_f_one_b())
    page.keyboard.down("Shift")
    drag(page, "[x(10), 300]", "[x(20), 300]")
    page.keyboard.up("Shift")
    assert visible(page) == [0, 37]
    assert page.locator("#details tbody tr").count() == 4
    busy = page.evaluate("() => picked && sumsBetween(timelines[0], 0, 10, 20).phases")
    assert busy[0] + busy[2] == pytest.approx(8, abs=0.1)  # rank 0 works from 11.5 to 17.5 and from 18 on
    page.get_by_role("button", name="zoom to it").click()
    assert visible(page) == pytest.approx([10, 20], abs=0.1)
    assert page.locator("#details").is_hidden()


def test_search_finds_cells_and_messages_and_fades_the_others(open_page: Open) -> None:
    page = open_page(one_f_one_b())
    found = {
        **{"mb 3": "8 cells", "stage 2": "16 cells", "stage 2 backward": "8 cells", "F3": "4 cells"},
        **{"rank 0 mb 1": "2 cells", "send": "51 messages", "gradient stage 3": "8 messages"},
        **{"recv mb 0": "6 messages", "layers.7": "nothing is called layers.7"},
    }
    for text, told in found.items():
        page.locator("#search").fill(text)
        assert page.locator("#found").inner_text() == told, text
    page.locator("#search").fill("backward")
    settle(page)
    faded, full = page.evaluate("""() => {
        const brush = { place: x, from: view.start, right: GUTTER + laneWidth() };
        const { faded, full } = gatherBoxes(timelines[0].lanes, brush);
        return [faded, full].map((rects) => [...rects.keys()]);
    }""")
    assert (faded, full) == (["rgb(140,184,242)"], ["rgb(245,178,107)"])


def test_keys_do_what_the_pointer_does(open_page: Open) -> None:
    page = open_page(one_f_one_b())
    page.locator("#canvas").focus()
    page.keyboard.press("n")
    assert details(page)[:2] == ["forward of microbatch 0", "stage 0, rank 0"]
    page.keyboard.press("n")
    assert details(page)[0] == "forward of microbatch 1"
    page.keyboard.press("j")
    assert details(page)[:2] == ["forward of microbatch 0", "stage 1, rank 1"]
    assert page.locator("#details").get_attribute("role") == "status"
    page.keyboard.press("Escape")
    assert page.locator("#details").is_hidden()
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="timeline").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => view.tab") == "runs"


# ---- the summary ----


def slowed(factor: float, rank: int) -> Timeline:
    """1F1B with one rank that is slower by a factor."""
    links = chain_links(4)
    costs = uniform_costs(4, links=links)
    compute = {key: time * (factor if key[0] == rank else 1) for key, time in costs.compute.items()}
    return simulate(lower(make_schedule("1f1b", 4, 8), links), replace(costs, compute=compute))


def test_the_summary_opens_first_and_its_parts_add_up(open_page: Open) -> None:
    timeline = one_f_one_b()
    page = open_page(timeline, address="")
    assert page.get_by_role("tab", name="summary").get_attribute("aria-selected") == "true"
    words = page.locator("#sentences").inner_text()
    assert "37 units for a step of 1f1b with 8 microbatches (its makespan)" in words
    assert f"idle for {timeline.bubble_rate:.1%}" in words
    assert "the slowest rank takes 37 units (the span)" in words
    rows = page.locator(".sums tbody tr").all_inner_texts()
    assert re.split(r"\s*\t\s*", rows[1]) == [
        *("rank 1", "8 units", "16 units", "8 units", "1.5 units + 2.5 units hidden"),
        *("1.25 units", "2.25 units", "rank 2, 7.75 units"),
    ]
    page.get_by_role("button", name="rank 3").click()
    assert page.get_by_role("tab", name="timeline").get_attribute("aria-selected") == "true"
    assert details(page)[0] == "rank 3"


@pytest.mark.parametrize("options", [{}, {"updates": True}, EVERYTHING])
def test_the_time_of_every_rank_is_accounted_for(open_page: Open, options: dict[str, object]) -> None:
    timeline = ended((3, 2, 1), 6, **options)
    page = open_page(timeline)
    sums = page.evaluate(
        "() => sumsOf(timelines[0]).map((sums) => total(partsOf(sums).map(([, time]) => time)))"
    )
    assert sums == pytest.approx([timeline.makespan] * 6, rel=1e-5)
    idle = "([from, to]) => idleOf(sumsBetween(timelines[0], 3, from, to))"
    halves = [page.evaluate(idle, span) for span in ((0, 7.3), (7.3, timeline.makespan))]
    assert sum(halves) == pytest.approx(page.evaluate(idle, (0, timeline.makespan)), rel=1e-5)


def test_the_summary_names_the_slowest_stage_and_compares_planned_with_measured(open_page: Open) -> None:
    names, timeline = ("planned", "measured"), slowed(1.5, 1)
    page = open_page(*(drawn(timeline, name) for name in names), address="")
    words = page.locator("#sentences").inner_text()
    assert "Stage 1 is the slowest, 33% longer than the mean of the stages." in words
    assert "Measured takes as long as planned." in words
    rows = [f"rank {rank}, {name}" for rank in range(4) for name in names]
    assert page.locator(".sums tbody th").all_inner_texts() == rows


# ---- memory and code of a pipeline ----


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


@cache
def compiled() -> Pipeline:
    loss_fn = nn.functional.cross_entropy
    pipe = pipec.compile(Net(), devices=2, loss_fn=loss_fn, microbatches=4, memory_limit="64kB")
    return pipe.prepare(torch.ones(8, 8), target=torch.ones(8, dtype=torch.int64))


@cache
def drawn_pipeline() -> tuple[DrawnStep, DrawnPipeline]:
    pipe = compiled()
    (step,) = trace_steps(pipe._artifact, Trace(pipe.simulate()))
    sources = [pipe.source(stage) for stage in range(2)]
    return step, DrawnPipeline(pipe.plan, pipe.programs, sources, [64e3, 64e3])


@pytest.mark.slow
def test_memory_is_shown_by_kind_with_its_peak_and_the_limit(open_page: Open) -> None:
    """Host memory is below the line, and outside of the limit."""
    step, pipeline = drawn_pipeline()
    away = [replace(curves, host=curves.total.amounts * 0.75) for curves in step.memory]
    page = open_page(replace(step, memory=away), pipeline=pipeline)
    press(page, "tab-memory")
    assert "below: offloaded, in host memory" in page.locator("#memoryLegend").inner_text()
    peaks = page.evaluate("() => timelines[0].memory.map(highest)")
    assert peaks == pytest.approx([need.peak_bytes for need in compiled().memory()], abs=2)
    lines = page.evaluate("""() => timelines[0].lanes.map((lane, rank) => {
        const { bottom, unit } = curveAxis(lane), curve = timelines[0].memory[rank];
        const most = curve.host.indexOf(largest(curve.host));
        const across = (x(curve.time[most]) + x(curve.time[most + 1])) / 2;
        const heights = [-data.limits[rank], 0, curve.host[most]].map((held) => bottom + unit * held);
        return [across, ...[...heights, lane.curveY + lane.curve].map((y) => y - view.top)];
    })""")
    dark = page.evaluate("() => colors['memory-offloaded']")
    for across, limit, zero, deepest, end in lines:
        assert limit < zero < deepest <= end + 1
        assert color_at(page, f"[{across}, {(zero + deepest) / 2}]") == dark
        assert color_at(page, f"[{across}, {zero - 2}]") != dark
    page.mouse.click(*point(page, "[20, timelines[0].lanes[0].y + 8]"))
    page.get_by_role("button", name="what is held at the peak").click()
    words = details(page)
    assert words[0] == page.evaluate("() => bytes(highest(timelines[0].memory[0]))")
    assert words[-1] == "limit: 64 kB"
    for begin in ("saved: ", "microbatches in flight, stage 0: ", "offloaded, in host memory besides: "):
        assert any(word.startswith(begin) for word in words)


def test_one_goes_from_a_cell_to_its_line_of_the_model_and_back_by_search(open_page: Open) -> None:
    step, pipeline = drawn_pipeline()
    page = open_page(step, pipeline=pipeline)
    forward = next(e for e in step.timeline.computes.of_rank(1) if e.instruction.op is Op.FORWARD)
    page.mouse.click(*point(page, lane(1, (forward.start + forward.end) / 2)))
    page.get_by_role("button", name="code", exact=True).click()
    assert re.fullmatch(r"\d+forward +stage 1 +mb 0\s*", page.locator("#program .marked").inner_text())
    assert "def forward(frame)" in page.locator("#source .marked").inner_text()
    page.locator("#source .line").filter(has_text="addmm(").first.click()
    assert re.match(r"layers\.\d · Linear, test_page\.py:\d+", page.locator("#origin").inner_text())
    page.get_by_role("button", name="its cells").click()
    assert page.locator("#found").inner_text() == "8 cells"
    assert page.evaluate("() => view.tab") == "timeline"
    for text, told in {"head": "8 cells", "layers.0 backward": "4 cells"}.items():
        page.locator("#search").fill(text)
        assert page.locator("#found").inner_text() == told, text


# ---- runs ----


def test_two_runs_are_compared_by_rank_and_kind(open_page: Open, tmp_path: Path) -> None:
    other = tmp_path / "yesterday.html"
    other.write_text(page_html([drawn(slowed(1.0, 2), "measured")]), encoding="utf-8")
    page = open_page(drawn(slowed(1.5, 2), "measured"), address="tab=runs")
    page.locator("#file").set_input_files(other)
    page.wait_for_function("() => known.length === 2")
    words = page.locator("#changes p").inner_text()
    assert "measured takes 32% longer than measured of yesterday.html" in words
    assert words.endswith("What changed most is the backward on rank 2: 8 units longer in all.")
    rows = [re.split(r"\s*\t\s*", row) for row in page.locator("#changes tbody tr").all_inner_texts()]
    assert rows[2][1:3] == ["+4 units", "+8 units"]
    assert rows[0][1:3] == ["\u2013", "\u2013"]
    names = page.evaluate("() => timelines.map(({ name }) => name)")
    assert names == ["measured", "measured of yesterday.html"]
    page.locator("#file").set_input_files({"name": "x.html", "mimeType": "text/html", "buffer": b"<p>no"})
    page.wait_for_function("() => byId('opened').textContent.includes('holds no steps')")


def test_a_run_names_its_straggler_and_the_steps_that_were_skipped_or_compiled(open_page: Open) -> None:
    steps = [drawn(slowed(1.0, 0), "planned")]
    for number, rank in enumerate((3, 1, 3, 3)):
        step = drawn(slowed(1.4, rank), f"step {100 * number}")
        steps.append(replace(step, is_run=True, note="skipped" if number == 1 else ""))
    page = open_page(*steps, address="tab=runs")
    assert page.evaluate("() => timelines.length") == 1
    words = page.locator("#runWords").inner_text()
    assert "Rank 3 computed longest in 3 of 4 steps." in words
    assert "step 100: skipped" in words
    assert page.locator(".chart button").count() == 4
    page.locator(".chart button").nth(2).click()
    settle(page)
    shown = page.evaluate("() => [view.tab, ...timelines.map(({ name }) => name)]")
    assert shown == ["timeline", "planned", "step 200"]


def test_parts_of_a_step_are_shown_beside_the_plan_of_the_same_part(open_page: Open) -> None:
    options = {"on_nan": "skip", "optimizer": partial(torch.optim.SGD, lr=0.1), "microbatches": 4}
    pipe = pipec.compile(Net(), 2, loss_fn=nn.functional.cross_entropy, **options)
    with pipe.trace(every=2) as run:
        for number in range(6):
            with pipe.accumulate():
                pipe.step(torch.full((8, 8), nan if number == 3 else 1.0), target=torch.arange(8))
            if number % 2:
                pipe.optimizer.step()
    sources = [pipe.source(stage) for stage in range(2)]
    pipeline = DrawnPipeline(pipe.plan, pipe.programs, sources, notes={7: "skipped"})
    page = open_page(*trace_steps(pipe._artifact, run), pipeline=pipeline, address="tab=summary")
    parts = ("without update", "update alone")
    names = [f"{kind} {part}" for part in parts for kind in ("planned", "measured")]
    assert page.evaluate("() => timelines.map(({ name }) => name)") == names
    letters = page.evaluate("""() => timelines.map(({ computes }) =>
        [...computes.phase].map((phase) => data.phases[phase].letter).sort().join(""))""")
    assert letters == ["B" * 8 + "F" * 8] * 2 + ["UU"] * 2
    words = page.locator("#sentences").inner_text()
    assert "for a step without its update of 1f1b with 4 microbatches" in words
    assert "for the update alone, after steps without one" in words
    compared = re.findall(r"^(.+) takes .* (?:than|as) (planned.+)\.$", words, re.MULTILINE)
    assert compared == [("Measured without update", names[0]), ("Measured update alone", names[2])]
    press(page, "tab-timeline")
    page.evaluate("() => select({ kind: 'compute', timeline: timelines[3], rank: 1, index: 1 })")
    page.get_by_role("button", name="code", exact=True).click()
    settle(page)
    assert re.match(r"\d+\s*update +stage 1", page.locator("#program .marked").inner_text())
    press(page, "tab-runs")
    words = page.locator("#runWords").inner_text()
    assert "3 steps took" in words
    assert "step 3 update alone: skipped" in words
    assert "Not recorded: step 7 (skipped)." in words
    assert page.locator(".chart button").count() == 3


# ---- narrow windows, notebooks, print ----


@pytest.mark.parametrize("width", [760, 900, 1010, 1250])
def test_nothing_is_cut_off_in_a_narrow_window(open_page: Open, width: int) -> None:
    """Buttons and legend fold; hints stay within reach; a long summary ends in dots."""
    step = drawn(played(zb_v(4, 8)), memory=[held((0.0, 1e9))] * 4)
    page = open_page(step, replace(step, memory=()), pipeline=drawn_pipeline()[1])
    page.set_viewport_size({"width": width, "height": 500})
    for name in page.evaluate("() => Object.keys(TABS)"):
        press(page, f"tab-{name}")
        assert page.evaluate("() => document.documentElement.scrollWidth") == width, name
        boxes = page.locator("#tools > button, #legend > span, #range, #help > *, footer").evaluate_all(
            """(all) => all.map((one) => one.getBoundingClientRect()).filter(({ width }) => width)
                .map(({ left, right, bottom }) => [left, right, bottom])"""
        )
        assert all(left >= 0 and right <= width and bottom <= 500 for left, right, bottom in boxes), name
        page.locator("#openKeys").click()
        assert "next and previous cell" in page.locator("dialog").inner_text()
        page.locator("#closeKeys").click()
    words = page.evaluate("() => shortened(timelines[0].summary, 200)")
    assert words.endswith("…")
    assert page.evaluate("(words) => ctx.measureText(words).width", words) <= 200


def test_a_notebook_shows_the_same_page_in_a_cell(open_page: Open) -> None:
    pipe = compiled()
    shown = pipe.visualize()
    assert shown.startswith("planned: 1f1b, 4 microbatches\n")
    assert (repr(shown), repr(pipe.plan)) == (str(shown), str(pipe.plan))
    page = open_page(one_f_one_b())
    page.set_content(shown._repr_html_())
    frame = page.frame_locator("iframe")
    frame.get_by_role("tab", name="code", exact=True).click()
    assert frame.locator("#sources option").count() == 2


def test_print_leaves_out_what_cannot_be_pressed(open_page: Open) -> None:
    page = open_page(one_f_one_b(), address="", scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    settle(page)
    assert color_at(page, "[2, 2]") == "#ffffff"  # paper is light
    assert page.locator("#tools").is_hidden()
    assert page.locator("#sentences").is_visible()
    assert page.locator("#canvas").is_visible()
