"""The views of the page beside the timeline itself, in a headless Chromium: each from what a visitor does."""

import re
from dataclasses import replace
from functools import cache, partial
from math import nan
from pathlib import Path

import pytest
import torch
from bare_programs import lower, uniform_costs
from page_views import Open, color_at, drag, hover, lane, one_f_one_b, point, press, settle
from playwright.sync_api import Page
from simulated_updates import EVERYTHING, ended
from torch import nn

import pipec
from pipec.drawn_artifacts import trace_steps
from pipec.ir import Op
from pipec.pipeline import Pipeline
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate
from pipec.timeline.trace import Trace
from pipec.viz import DrawnPipeline, DrawnStep, page_html


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
def drawn_pipeline() -> tuple[list[DrawnStep], DrawnPipeline]:
    pipe = compiled()
    sources = [pipe.source(stage) for stage in range(2)]
    steps = trace_steps(pipe._artifact, Trace(pipe.simulate()))
    return steps, DrawnPipeline(pipe.plan, pipe.programs, sources, [64e3, 64e3])


def open_pipeline(open_page: Open) -> Page:
    steps, pipeline = drawn_pipeline()
    return open_page({}, steps=steps, pipeline=pipeline)


def tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()
    settle(page)


def cell(page: Page, rank: int, time: float) -> None:
    page.mouse.click(*point(page, lane(rank, time)))
    settle(page)


def details(page: Page) -> list[str]:
    return page.locator("#details > b, #details > p").all_inner_texts()


# ---- the summary ----


def test_the_summary_opens_first_and_its_parts_add_up(open_page: Open) -> None:
    timeline = one_f_one_b()
    page = open_page({"1f1b": timeline}, address="")
    assert page.get_by_role("tab", name="summary").get_attribute("aria-selected") == "true"
    words = page.locator("#sentences").inner_text()
    assert "37 units for a step of 1f1b with 8 microbatches (its makespan)" in words
    assert f"idle for {timeline.bubble_rate:.1%}" in words
    assert "the slowest rank takes 37 units (the span)" in words
    rows = page.locator(".sums tbody tr").all_inner_texts()
    assert [re.split(r"\s*\t\s*", row) for row in rows][1] == [
        "rank 1",
        "8 units",
        "16 units",
        "8 units",
        "1.5 units + 2.5 units hidden",
        "1.25 units",
        "2.25 units",
        "rank 2, 7.75 units",
    ]
    page.get_by_role("button", name="rank 3").click()
    assert page.get_by_role("tab", name="timeline").get_attribute("aria-selected") == "true"
    assert details(page)[0] == "rank 3"


@pytest.mark.parametrize("options", [{}, {"updates": True}, EVERYTHING])
def test_the_time_of_every_rank_is_accounted_for(open_page: Open, options: dict[str, object]) -> None:
    timeline = ended((3, 2, 1), 6, **options)
    page = open_page({"3-2-1": timeline})
    sums = page.evaluate(
        "() => sumsOf(timelines[0]).map((sums) => total(partsOf(sums).map(([, time]) => time)))"
    )
    assert sums == pytest.approx([timeline.makespan] * 6, rel=1e-5)
    idle = "([from, to]) => idleOf(sumsBetween(timelines[0], 3, from, to))"
    halves = [page.evaluate(idle, span) for span in ((0, 7.3), (7.3, timeline.makespan))]
    assert sum(halves) == pytest.approx(page.evaluate(idle, (0, timeline.makespan)), rel=1e-5)


def test_the_summary_names_the_slowest_stage_and_compares_planned_with_measured(open_page: Open) -> None:
    costs = uniform_costs(2, forward=1.0, backward_input=1.0, backward_weight=0.0)
    slower = {key: time * (1.5 if key[0] else 1) for key, time in costs.compute.items()}
    timeline = simulate(lower(make_schedule("1f1b", 2, 1), chain_links(2)), replace(costs, compute=slower))
    steps = [DrawnStep("1f1b", 1, timeline, label=label) for label in ("planned", "measured")]
    page = open_page({}, steps=steps, address="")
    words = page.locator("#sentences").inner_text()
    assert "Stage 1 is the slowest, 20% longer than the mean of the stages." in words
    assert "Measured takes as long as planned." in words
    rows = [f"rank {rank}, {label}" for rank in (0, 1) for label in ("planned", "measured")]
    assert page.locator(".sums tbody th").all_inner_texts() == rows


def test_what_a_plan_counts_for_the_host_is_told(open_page: Open) -> None:
    timeline = one_f_one_b(2, 2)
    later = tuple(replace(event, start=event.start + 2, end=event.end + 2) for event in timeline.events)
    late = Timeline(later, timeline.peak_in_flight, timeline.unit)
    page = open_page({}, steps=[DrawnStep("1f1b", 2, late, host_seconds=2.0)])
    assert hover(page, lane(0, 1.0))[3] == (
        "the plan counts 2 units on the host before the first instruction: arguments are checked and compared"
    )
    assert "hatched: host" in page.locator("#legend").inner_text()
    assert page.evaluate("() => sumsOf(timelines[0]).map(({ host }) => host)") == [2, 2]


# ---- ranges, search, lanes ----


def test_a_picked_range_shows_sums_by_rank_and_kind(open_page: Open) -> None:
    page = open_page({"1f1b": one_f_one_b()})
    page.keyboard.down("Shift")
    drag(page, "[x(10), 300]", "[x(20), 300]")
    page.keyboard.up("Shift")
    assert page.locator("#range").inner_text().startswith("0 to 37 units")
    rows = page.locator("#details tbody tr").all_inner_texts()
    assert len(rows) == 4
    busy = page.evaluate("() => picked && sumsBetween(timelines[0], 0, 10, 20).phases")
    assert busy[0] + busy[2] == pytest.approx(8, abs=0.1)  # rank 0 works from 11.5 to 17.5 and from 18 on
    page.get_by_role("button", name="zoom to it").click()
    settle(page)
    assert page.evaluate("() => [view.start, view.end]") == pytest.approx([10, 20], abs=0.1)
    assert page.locator("#details").is_hidden()


def test_search_finds_cells_and_messages_and_fades_the_others(open_page: Open) -> None:
    page = open_page({"1f1b": one_f_one_b()})
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


def test_enter_goes_from_match_to_match(open_page: Open) -> None:
    page = open_page({"1f1b": one_f_one_b(4, 512)})
    page.keyboard.press("/")
    page.keyboard.type("stage 1 mb 500")
    page.keyboard.press("Enter")
    assert details(page)[:2] == ["forward of microbatch 500", "stage 1, rank 1"]
    start, end = page.evaluate("() => [view.start, view.end]")
    assert end - start < 40
    page.keyboard.press("Enter")
    assert details(page)[0] == "backward of microbatch 500"
    assert page.locator("#found").inner_text() == "2 of 2"


def test_keys_do_what_the_pointer_does(open_page: Open) -> None:
    page = open_page({"1f1b": one_f_one_b()})
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


# ---- memory ----


@pytest.mark.slow
def test_memory_is_shown_by_kind_with_its_peak_and_the_limit(open_page: Open) -> None:
    """What is in host memory is below the line, and outside of the limit."""
    steps, pipeline = drawn_pipeline()
    away = [replace(curves, host=curves.total.amounts * 0.75) for curves in steps[0].memory]
    page = open_page({}, steps=[replace(steps[0], memory=away)], pipeline=pipeline)
    tab(page, "memory")
    assert "below: offloaded, in host memory" in page.locator("#memoryLegend").inner_text()
    kinds = page.evaluate("() => Object.keys(timelines[0].memory[0].kinds)")
    assert {"parameters", "gradients", "saved"} <= set(kinds)
    sums = page.evaluate("""() => timelines[0].memory.map((curve) => {
        const sum = curve.amount.map((_, i) => total(Object.values(curve.kinds).map((held) => held[i])));
        return largest(sum.map((each, i) => Math.abs(each - curve.amount[i])));
    })""")
    assert max(sums) <= len(kinds)
    peaks = page.evaluate("() => timelines[0].memory.map(highest)")
    assert peaks == pytest.approx([need.peak_bytes for need in compiled().memory()], abs=2)
    on_host = page.evaluate("() => timelines[0].memory.map(({ host }) => largest(host))")
    assert on_host == pytest.approx([curves.host.max() for curves in away], abs=1)
    lines = page.evaluate("""() => timelines[0].lanes.map((lane, rank) => {
        const { bottom, unit } = curveAxis(lane), curve = timelines[0].memory[rank];
        const deepest = curve.host.indexOf(largest(curve.host));
        const [from, to] = [deepest, deepest + 1].map((i) => x(curve.time[i]));
        const heights = [bottom, bottom + unit * curve.host[deepest], lane.curveY + lane.curve];
        const limit = bottom - unit * data.limits[rank];
        return [(from + to) / 2, ...[...heights, limit].map((y) => y - view.top)];
    })""")
    dark = page.evaluate("() => colors['memory-offloaded']")
    for across, zero, deepest, end, limit in lines:
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


# ---- code ----


def test_one_goes_from_a_cell_to_its_line_of_the_model_and_back_by_search(
    open_page: Open,
) -> None:
    page = open_pipeline(open_page)
    forward = next(e for e in compiled().simulate().computes.of_rank(1) if e.instruction.op is Op.FORWARD)
    cell(page, 1, (forward.start + forward.end) / 2)
    page.get_by_role("button", name="code", exact=True).click()
    assert re.fullmatch(r"\d+forward +stage 1 +mb 0\s*", page.locator("#program .marked").inner_text())
    assert "def forward(frame)" in page.locator("#source .marked").inner_text()
    page.locator("#source .line").filter(has_text="addmm(").first.click()
    assert re.match(r"layers\.\d · Linear, test_views\.py:\d+", page.locator("#origin").inner_text())
    page.get_by_role("button", name="its cells").click()
    assert page.locator("#found").inner_text() == "8 cells"
    assert page.evaluate("() => view.tab") == "timeline"
    for text, told in {"head": "8 cells", "layers.0 backward": "4 cells"}.items():
        page.locator("#search").fill(text)
        assert page.locator("#found").inner_text() == told, text


# ---- runs ----


def slowed(factor: float, rank: int) -> Timeline:
    """1F1B on costs by which one rank is slower."""
    links = chain_links(4)
    costs = uniform_costs(4, links=links)
    compute = {key: time * (factor if key[0] == rank else 1) for key, time in costs.compute.items()}
    return simulate(lower(make_schedule("1f1b", 4, 8), links), replace(costs, compute=compute))


def test_two_runs_are_compared_by_rank_and_kind(open_page: Open, tmp_path: Path) -> None:
    other = tmp_path / "yesterday.html"
    other.write_text(page_html([DrawnStep("1f1b", 8, slowed(1.0, 2), label="measured")]), encoding="utf-8")
    page = open_page({}, steps=[DrawnStep("1f1b", 8, slowed(1.5, 2), label="measured")])
    tab(page, "runs")
    page.locator("#file").set_input_files(other)
    page.wait_for_function("() => known.length === 2")
    words = page.locator("#changes p").inner_text()
    assert "measured takes 32% longer than measured of yesterday.html" in words
    assert words.endswith("What changed most is the backward on rank 2: 8 units longer in all.")
    rows = [re.split(r"\s*\t\s*", row) for row in page.locator("#changes tbody tr").all_inner_texts()]
    assert rows[2][1:3] == ["+4 units", "+8 units"]
    assert rows[0][1:3] == ["\u2013", "\u2013"]
    assert page.evaluate("() => timelines.map(({ name }) => name)") == [
        "measured",
        "measured of yesterday.html",
    ]
    page.locator("#file").set_input_files({"name": "x.html", "mimeType": "text/html", "buffer": b"<p>no"})
    page.wait_for_function("() => byId('opened').textContent.includes('holds no steps')")


def test_a_run_names_its_straggler_and_the_steps_that_were_skipped_or_compiled(open_page: Open) -> None:
    ranks = [3, 1, 3, 3]
    steps = [DrawnStep("1f1b", 8, slowed(1.0, 0), label="planned")]
    for number, rank in enumerate(ranks):
        run = {"label": f"step {100 * number}", "is_run": True, "note": "skipped" if number == 1 else ""}
        steps.append(DrawnStep("1f1b", 8, slowed(1.4, rank), **run))
    page = open_page({}, steps=steps)
    assert page.evaluate("() => timelines.length") == 1
    tab(page, "runs")
    words = page.locator("#runWords").inner_text()
    assert "Rank 3 computed longest in 3 of 4 steps." in words
    assert "step 100: skipped" in words
    assert page.locator(".chart button").count() == 4
    page.locator(".chart button").nth(2).click()
    settle(page)
    assert page.evaluate("() => [view.tab, ...timelines.map(({ name }) => name)]") == [
        "timeline",
        "planned",
        "step 200",
    ]


def test_parts_of_a_step_are_shown_beside_the_plan_of_the_same_part(open_page: Open) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    options = {"on_nan": "skip", "optimizer": partial(torch.optim.SGD, lr=0.1), "microbatches": 4}
    pipe = pipec.compile(layers, 2, loss_fn=nn.functional.mse_loss, **options)
    x = torch.randn(8, 8)
    with pipe.trace(every=2) as run:
        for number in range(6):
            with pipe.accumulate():
                pipe.step(x * (nan if number == 3 else 1), target=x)
            if number % 2:
                pipe.optimizer.step()
    assert run.notes == {0: "compiled", 3: "skipped"}
    sources = [pipe.source(stage) for stage in range(2)]
    steps = trace_steps(pipe._artifact, run)
    page = open_page(
        {}, steps=steps, pipeline=DrawnPipeline(pipe.plan, pipe.programs, sources, notes={7: "skipped"})
    )
    parts = ("without update", "update alone")
    names = [f"{kind} {part}" for part in parts for kind in ("planned", "measured")]
    assert page.evaluate("() => timelines.map(({ name }) => name)") == names
    letters = page.evaluate("""() => timelines.map(({ computes }) =>
        [...computes.phase].map((phase) => data.phases[phase].letter).sort().join(""))""")
    assert letters == ["B" * 8 + "F" * 8] * 2 + ["UU"] * 2
    tab(page, "summary")
    words = page.locator("#sentences").inner_text()
    assert "for a step without its update of 1f1b with 4 microbatches" in words
    assert "for the update alone, after steps without one" in words
    compared = re.findall(r"^(.+) takes .* (?:than|as) (planned.+)\.$", words, re.MULTILINE)
    assert compared == [("Measured without update", names[0]), ("Measured update alone", names[2])]
    tab(page, "timeline")
    page.evaluate("() => select({ kind: 'compute', timeline: timelines[3], rank: 1, index: 1 })")
    page.get_by_role("button", name="code", exact=True).click()
    settle(page)
    assert re.match(r"\d+\s*update +stage 1", page.locator("#program .marked").inner_text())
    tab(page, "runs")
    words = page.locator("#runWords").inner_text()
    assert "3 steps took" in words
    assert "step 3 update alone: skipped" in words
    assert "Not recorded: step 7 (skipped)." in words
    assert page.locator(".chart button").count() == 3


# ---- large steps, narrow windows, notebooks, print ----


def test_of_very_many_ranks_all_are_in_view_and_one_goes_into_a_window(open_page: Open) -> None:
    page = open_page({"1f1b": one_f_one_b(200, 8)})
    last = "() => { const { y, pitch } = timelines[0].lanes[199]; return y + pitch <= page.height; }"
    assert page.evaluate(last)
    page.mouse.click(*point(page, "[x(100), timelines[0].lanes[100].y + 1]"))
    settle(page)
    page.locator("#search").fill("rank 100 mb 5")
    page.locator("#search").press("Enter")
    settle(page)
    roomy, width = page.evaluate("() => [timelines[0].lanes[100].pitch >= LEAST_ROOMY, scale()]")
    assert roomy
    assert width > 20
    press(page, "fit")
    assert page.evaluate(last)


def test_a_notebook_shows_the_same_page_in_a_cell(open_page: Open) -> None:
    pipe = compiled()
    shown = pipe.visualize()
    assert shown.startswith("planned: 1f1b, 4 microbatches\n")
    assert (repr(shown), repr(pipe.plan)) == (str(shown), str(pipe.plan))
    page = open_page({"1f1b": one_f_one_b()})
    page.set_content(shown._repr_html_())
    frame = page.frame_locator("iframe")
    frame.get_by_role("tab", name="code", exact=True).click()
    assert frame.locator("#sources option").count() == 2


def test_no_view_is_wider_than_its_window(open_page: Open) -> None:
    page = open_pipeline(open_page)
    page.set_viewport_size({"width": 900, "height": 700})
    for name in page.evaluate("() => Object.keys(TABS)"):
        page.evaluate("(name) => openTab(name)", name)
        settle(page)
        assert page.evaluate("() => document.documentElement.scrollWidth") == 900, name
        assert page.locator("#openKeys").is_visible()
        bottom = page.locator("footer").evaluate("(footer) => footer.getBoundingClientRect().bottom")
        assert bottom <= 700, name


def test_print_leaves_out_what_cannot_be_pressed(open_page: Open) -> None:
    page = open_page({"1f1b": one_f_one_b()}, address="", scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    settle(page)
    assert color_at(page, "[2, 2]") == "#ffffff"  # paper is light
    assert page.locator("#tools").is_hidden()
    assert page.locator("#sentences").is_visible()
    assert page.locator("#canvas").is_visible()
