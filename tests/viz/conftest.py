"""A headless Chromium, and pages opened in it from files."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from chromium import CHROMIUM
from page_views import Open, settle, steps_of
from playwright.sync_api import Browser, Page, sync_playwright

from pipec.timeline.curves import MemoryCurves
from pipec.timeline.events import Timeline
from pipec.viz import DrawnPipeline, DrawnStep, page_html


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
    """Open timelines from a file; what the page complains of, or asks for beyond itself, fails the test."""
    complaints: list[str] = []

    def open_(
        timelines: Mapping[str, Timeline],
        title: str = "",
        memory: Mapping[str, list[MemoryCurves]] | None = None,
        scheme: str = "light",
        address: str = "tab=timeline",
        steps: list[DrawnStep] | None = None,
        pipeline: DrawnPipeline | None = None,
    ) -> Page:
        path = tmp_path / "timeline.html"
        drawn = page_html(steps or steps_of(timelines, memory), title, pipeline)
        path.write_text(drawn, encoding="utf-8")
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
