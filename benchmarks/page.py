"""The page of a step in a headless Chromium: how large it is, how long it takes to open, and how it scrolls.

A frame is the time from one animation frame to the next while the wheel turns: zooming in and out over the
middle of the step, and scrolling through the ranks. Chromium draws at most 60 frames a second, without a GPU.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from pipec.schedules import Workload, make_schedule
from pipec.schedules.chain_simulation import simulate_schedule
from pipec.viz import DrawnStep, draw_steps

SIZES = ((4, 8), (64, 256), (1024, 4096))

_TURN = """async ({ deltaY, px }) => {
    const box = canvas.getBoundingClientRect();
    const times = [];
    const next = () => new Promise(requestAnimationFrame);
    await next();
    for (let k = 0; k < 60; k++) {
        const begun = performance.now();
        const sign = k < 30 ? -1 : 1;
        canvas.dispatchEvent(new WheelEvent("wheel", {
            deltaY: sign * deltaY, clientX: box.left + px * box.width, clientY: box.top + 300,
        }));
        await next();
        await next();
        times.push((performance.now() - begun) / 2);
    }
    return times.sort((one, other) => one - other);
}"""


@dataclass(frozen=True)
class Measured:
    """What one page takes: seconds, bytes, and milliseconds of frames."""

    ranks: int
    microbatches: int
    cells: int
    draw_seconds: float
    num_bytes: int
    open_seconds: float
    zoom_ms: float
    zoom_worst_ms: float
    scroll_ms: float
    scroll_worst_ms: float


def measure(browser: Browser, num_ranks: int, num_microbatches: int, folder: Path) -> Measured:
    """Draw a step of 1F1B, open it, and move about in it."""
    work = Workload.uniform(num_ranks, message=0.1)
    timeline, _ = simulate_schedule(make_schedule("1f1b", num_ranks, num_microbatches, work), work)
    path = folder / f"{num_ranks}x{num_microbatches}.html"
    begun = time.perf_counter()
    draw_steps(path, [DrawnStep("1f1b", num_microbatches, timeline)])
    drawn = time.perf_counter() - begun
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.set_default_timeout(300_000)
    begun = time.perf_counter()
    page.goto(f"{path.as_uri()}#tab=timeline")
    page.wait_for_function("document.body.dataset.ready")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    opened = time.perf_counter() - begun
    zoomed, scrolled = _frames(page, deltaY=150, px=0.5), _frames(page, deltaY=300, px=0.01)
    page.close()
    return Measured(
        num_ranks,
        num_microbatches,
        len(timeline.blocking),
        drawn,
        path.stat().st_size,
        opened,
        *(zoomed[len(zoomed) // 2], zoomed[-2]),
        *(scrolled[len(scrolled) // 2], scrolled[-2]),
    )


def _frames(page: Page, **wheel: float) -> Sequence[float]:
    found: Sequence[float] = page.evaluate(_TURN, wheel)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most-ranks", type=int, default=1024, help="leave out larger steps")
    most = parser.parse_args().most_ranks
    print("| ranks, microbatches | cells | write | file | open | zoom: median, worst frame | scroll |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        found = shutil.which("chromium", path=f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for size in SIZES:
            if size[0] > most:
                continue
            m = measure(browser, *size, Path(folder))
            print(
                f"| {m.ranks:,} x {m.microbatches:,} | {m.cells:,} | {m.draw_seconds:.2g} s "
                f"| {m.num_bytes / 1e3:,.0f} kB | {m.open_seconds:.2g} s "
                f"| {m.zoom_ms:.0f}, {m.zoom_worst_ms:.0f} ms "
                f"| {m.scroll_ms:.0f}, {m.scroll_worst_ms:.0f} ms |",
                flush=True,
            )
        browser.close()


if __name__ == "__main__":
    main()
