"""What the tests of the interactive page share: steps to show, and what a visitor sees and does."""

import base64
import gzip
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from bare_programs import lower, uniform_costs
from example_schedules import result_link
from playwright.sync_api import Page

from pipec.ir import Schedule
from pipec.programs.lower import chain_links
from pipec.schedules import make_schedule
from pipec.timeline.curves import Curve, MemoryCurves
from pipec.timeline.events import Timeline
from pipec.timeline.simulate import simulate
from pipec.viz import DrawnStep

Open = Callable[..., Page]


def played(schedule: Schedule, **costs: float | str) -> Timeline:
    links = (*chain_links(schedule.num_stages), result_link(schedule.num_stages - 1))
    return simulate(lower(schedule, links), uniform_costs(schedule.num_stages, links=links, **costs))


def one_f_one_b(num_ranks: int = 4, num_microbatches: int = 8, **costs: float | str) -> Timeline:
    return played(make_schedule("1f1b", num_ranks, num_microbatches), message=0.25, **costs)


def steps_of(
    timelines: Mapping[str, Timeline], memory: Mapping[str, list[MemoryCurves]] | None = None
) -> list[DrawnStep]:
    found = memory or {}
    return [DrawnStep("1f1b", 8, each, found.get(name, ()), name) for name, each in timelines.items()]


def held(*steps: tuple[float, float]) -> MemoryCurves:
    """Memory of one category."""
    curve = Curve.of(steps)
    return MemoryCurves(curve, {"saved": curve.amounts})


def unpack(text: str) -> Any:
    """The data that was packed, with lists in place of columns."""
    packed = gzip.decompress(base64.b64decode(text))
    length = int.from_bytes(packed[:4], "little")
    columns = packed[4 + length :]

    def restored(found: dict[str, Any]) -> Any:
        if "#column" not in found:
            return found
        offset, count, width, divisor, _ = found["#column"]
        planes = np.frombuffer(columns, np.uint8, count * width, offset).reshape(width, count)
        signs = np.where(planes[-1] > 127, 255, 0).astype(np.uint8)
        wide = np.stack([*planes, *[signs] * (8 - width)], axis=1)
        numbers = np.cumsum(wide.view("<i8").reshape(-1))
        return (numbers / divisor if divisor != 1 else numbers).tolist()

    return json.loads(packed[4 : 4 + length], object_hook=restored)


def embedded(html: str) -> Any:
    found = re.search(r'<script type="text/plain" id="data">([A-Za-z0-9+/=]*)</script>', html)
    assert found
    return unpack(found[1])


def settle(page: Page) -> None:
    """Wait until what was asked for is drawn."""
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def point(page: Page, place: str) -> tuple[float, float]:
    """Where on the screen a place on the canvas is; ``place`` is JavaScript for [x, y]."""
    px, py = page.evaluate(f"() => {place}")
    box = page.locator("#canvas").bounding_box()
    assert box
    return box["x"] + px, box["y"] + py


def hover(page: Page, place: str) -> list[str]:
    """What the card says when the pointer is there; nothing if it is hidden."""
    page.mouse.move(*point(page, place))
    settle(page)
    return [] if page.locator("#card").is_hidden() else page.locator("#card > *").all_inner_texts()


def lane(rank: int, time: float, timeline: int = 0, part: str = "y + 5") -> str:
    """A place in the lane of a rank; ``part`` is how far down, from the names of its measures."""
    return f"(({{y, curveY}}) => [x({time}), {part} - view.top])(timelines[{timeline}].lanes[{rank}])"


def drag(page: Page, start: str, to: str) -> None:
    page.mouse.move(*point(page, start))
    page.mouse.down()
    page.mouse.move(*point(page, to), steps=4)
    page.mouse.up()
    settle(page)


def visible(page: Page) -> tuple[float, float]:
    start, end = re.match(r"([\d.]+) to ([\d.]+) units of", page.locator("#range").inner_text()).groups()
    return float(start), float(end)


# Reading the canvas itself would make Chromium draw it differently from then on.
COPY = """
    const copy = new OffscreenCanvas(canvas.width, canvas.height);
    const pen = copy.getContext("2d", { willReadFrequently: true });
    pen.drawImage(canvas, 0, 0);
"""


def color_at(page: Page, place: str) -> str:
    """The colour drawn at a place, as ``#rrggbb``."""
    code = f"const at = {place}; return [...pen.getImageData(...at.map(Math.round), 1, 1).data.slice(0, 3)];"
    red, green, blue = page.evaluate(f"() => {{ {COPY} {code} }}")
    return f"#{red:02x}{green:02x}{blue:02x}"


def count_color(page: Page, name: str) -> int:
    """How many pixels below the axis have a colour of the style sheet."""
    code = """
        const wanted = parseInt(colors[name].slice(1), 16);
        const { data } = pen.getImageData(0, TOP, canvas.width, canvas.height - TOP);
        let count = 0;
        for (let k = 0; k < data.length; k += 4)
            count += ((data[k] << 16) | (data[k + 1] << 8) | data[k + 2]) === wanted;
        return count;
    """
    return page.evaluate(f"(name) => {{ {COPY} {code} }}", name)


def press(page: Page, button: str) -> None:
    page.locator(f"#{button}").click()
    settle(page)
