"""A timeline as a self-contained SVG: a lane per rank, a box per compute, thin arrows for messages.

Collectives have a narrow band below the lane of their rank. Replicas of a stage stand together.

The picture is a card with its own background, light or dark as the viewer prefers.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

from pipec.errors import InputError
from pipec.ir import Payload
from pipec.timeline.events import Event, Timeline
from pipec.viz.html import page_file
from pipec.viz.labels import (
    NAMES,
    chunk_indices,
    event_labels,
    lane_name,
    ops_present,
    overlap_rows,
    summary,
    time_axis,
)

_STYLE = """
svg { font-family: ui-sans-serif, system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
text { fill: #57606a; font-size: 11px; }
.title { fill: #1f2328; font-size: 15px; font-weight: 600; }
.box { fill: #1f2328; font-size: 10.5px; text-anchor: middle; }
.small { fill: #1f2328; font-size: 9px; text-anchor: middle; }
.right { text-anchor: end; }
.middle { text-anchor: middle; }
.card { fill: #ffffff; stroke: #d0d7de; }
.lane { fill: #f1f3f5; }
.grid { stroke: #d8dee4; stroke-width: 1; }
{ops}
.message { fill: none; stroke-width: 1; }
.activation { stroke: #2f6fc4; }
.gradient { stroke: #b8650f; }
.activation-head { fill: #2f6fc4; }
.gradient-head { fill: #b8650f; }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1; }
  .title { fill: #f0f6fc; }
  .card { fill: #161b22; stroke: #30363d; }
  .lane { fill: #21262d; }
  .grid { stroke: #30363d; }
  .activation { stroke: #79b0f5; }
  .gradient { stroke: #f0a04b; }
  .activation-head { fill: #79b0f5; }
  .gradient-head { fill: #f0a04b; }
}
"""

_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 72, 72, 64
"""Margins around the lanes, in pixels, without the names of the lanes."""

_CELL_WIDTH = 26
"""The shortest compute is so many pixels wide, unless the lanes would then leave ``_WIDTHS``."""

_WIDTHS = (600, 1600)
_CHARACTER_WIDTH = 6.4
_MOST_BOXES = 50_000
"""The most boxes of a picture, which then has some 5 MB."""

_MOST_ARROWS = 2_000
_BAND = 0.5
"""The height of the band for collectives and copies, as a share of the lane's."""

_SIDESTEP = 2.0
"""Arrows of activations are drawn so many pixels to the left, those of gradients to the right."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where times and ranks are on the page, in pixels.

    The lanes begin at ``left``, and that of a rank is below ``tops[rank]``. Each has a ``band`` below it for
    the collectives and copies of its rank; it is 0 where there are none.
    """

    scale: float
    width: float
    left: float
    lane: float
    gap: float
    band: float
    tops: Sequence[float]

    @staticmethod
    def of(timeline: Timeline) -> "_Layout":
        durations = timeline.computes.ends - timeline.computes.starts
        shortest = float(durations[durations > 0].min(initial=timeline.makespan or 1.0))
        wished = timeline.makespan / shortest * _CELL_WIDTH
        width = min(max(wished, _WIDTHS[0]), _WIDTHS[1])
        lane, gap = next(
            sizes
            for most, *sizes in ((16, 26, 14), (64, 16, 8), (float("inf"), 5, 1))
            if timeline.num_ranks <= most
        )
        band = lane * _BAND if len(timeline.overlapped) else 0.0
        tops = [float(_TOP)]
        has_replicas = any(len(ranks) > 1 for ranks in timeline.replicas.values())
        for before, stages in pairwise(timeline.stages):
            is_apart = before != stages and has_replicas
            tops.append(tops[-1] + lane + band + gap * (1.7 if is_apart else 1.0))
        longest = max(len(lane_name(timeline, rank)) for rank in range(timeline.num_ranks))
        left = _LEFT + max(50.0, _CHARACTER_WIDTH * 0.9 * longest)
        return _Layout(width / (timeline.makespan or 1.0), width, left, lane, gap, band, tops)

    def x(self, time: float) -> float:
        return self.left + time * self.scale

    def y(self, rank: int) -> float:
        return self.tops[rank]

    @property
    def pitch(self) -> float:
        return self.lane + self.band + self.gap

    @property
    def bottom(self) -> float:
        return self.tops[-1] + self.lane + self.band


def timeline_svg(timeline: Timeline, title: str = "") -> str:
    """The timeline as the text of an SVG file, under ``title`` and its figures of merit. Deterministic.

    Raises InputError for more boxes than a viewer opens.
    """
    if (count := len(timeline.blocking) + len(timeline.overlapped)) > _MOST_BOXES:
        raise InputError(
            f"a picture of {count:,} boxes; expected at most {_MOST_BOXES:,}: draw .html, which shows all of "
            "them, or a step of fewer microbatches or ranks"
        )
    layout = _Layout.of(timeline)
    messages = _messages(timeline, layout)
    parts = [
        *_card(layout, title, summary(timeline)),
        *_axis(timeline, layout),
        *_lanes(timeline, layout),
        *(_arrow(message, layout) for message in messages),
        *_boxes(timeline, layout),
        *_beside(timeline, layout),
        *_legend(timeline, dict.fromkeys(map(_kind, messages)), layout),
        "</svg>",
    ]
    return "\n".join([*parts, ""])


def _card(layout: _Layout, title: str, figures: str) -> Iterator[str]:
    width, height = layout.left + layout.width + _RIGHT, layout.bottom + _BOTTOM
    shown = "".join(filter(str.isprintable, title))
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_px(width)}" height="{_px(height)}" '
        f'viewBox="0 0 {_px(width)} {_px(height)}" style="max-width: 100%; height: auto" role="img">'
    )
    yield f"<title>{escape(shown or 'timeline')}</title>"
    colours = re.findall(r"--(\w+): (#\w+)", page_file("style.css").partition("@media")[0])
    ops = "\n".join(f".{op} {{ fill: {colour}; }}" for op, colour in colours if op in NAMES)
    yield f"<style>{_STYLE.replace('{ops}', ops)}</style>"
    yield f"<defs>{_head('activation')}{_head('gradient')}</defs>"
    yield f'<rect class="card" x="0.5" y="0.5" width="{_px(width - 1)}" height="{_px(height - 1)}" rx="8"/>'
    yield _text(20, 30, shown, "title")
    yield _text(20, 50 if shown else 30, figures)


def _head(name: str) -> str:
    size = 'viewBox="0 0 6 6" refX="5.5" refY="3" markerWidth="5" markerHeight="5" orient="auto"'
    return f'<marker id="{name}" {size}><path class="{name}-head" d="M0 0L6 3L0 6z"/></marker>'


def _axis(timeline: Timeline, layout: _Layout) -> Iterator[str]:
    unit, ticks = time_axis(timeline, most=12)
    yield _text(layout.left - 10, layout.bottom + 20, f"time, {unit}", "right")
    for time, text in ticks:
        x = layout.x(time)
        yield f'<path class="grid" d="M{_px(x)} {_px(_TOP - 4)}V{_px(layout.bottom + 6)}"/>'
        yield _text(x, layout.bottom + 20, text, "middle")


def _lanes(timeline: Timeline, layout: _Layout) -> Iterator[str]:
    named = max(1, round(14 / layout.pitch))
    yield _text(layout.left + layout.width + 10, _TOP - 9, "in flight")
    for rank, peak in enumerate(timeline.peak_in_flight):
        yield _rect(layout.left, layout.y(rank), layout.width, layout.lane, "lane")
        if rank % named == 0:
            baseline = layout.y(rank) + layout.lane / 2 + 4
            yield _text(layout.left - 10, baseline, lane_name(timeline, rank), "right")
            yield _text(layout.left + layout.width + 10, baseline, str(peak))


def _messages(timeline: Timeline, layout: _Layout) -> list[Event]:
    """The messages of microbatches, or none where arrows would only blur the picture."""
    messages = timeline.messages.where(timeline.messages.instructions.microbatches >= 0)
    return list(messages) if len(messages) <= _MOST_ARROWS and layout.gap > 4 else []


def _arrow(message: Event, layout: _Layout) -> str:
    """From the end of the box that sends to the lane that receives, behind the lanes between."""
    source, target = layout.y(message.rank), layout.y(message.instruction.peer)
    start, end = (source + layout.lane, target) if source < target else (source, target + layout.lane)
    kind = _kind(message)
    aside = _SIDESTEP if kind == "gradient" else -_SIDESTEP
    left, right = (_px(layout.x(time) + aside) for time in (message.start, message.end))
    line = f"M{left} {_px(start)}L{right} {_px(end)}"
    return f'<path class="message {kind}" marker-end="url(#{kind})" d="{line}"/>'


def _kind(event: Event) -> str:
    link = event.instruction.link
    return "gradient" if link and link.payload is Payload.GRADIENT else "activation"


def _boxes(timeline: Timeline, layout: _Layout) -> Iterator[str]:
    label, chunk_of = _fitting_labels(timeline, layout), chunk_indices(timeline)
    last_chunk = max(chunk_of.values(), default=0)
    for event in timeline.blocking.where(timeline.blocking.ends > timeline.blocking.starts):
        left, width = layout.x(event.start), (event.end - event.start) * layout.scale
        gap = 1.0 if width >= 6 else 0.0
        shade = 1 - 0.45 * chunk_of[event.instruction.stage] / last_chunk if last_chunk else 1.0
        y, op = layout.y(event.rank), event.instruction.op
        yield _rect(left, y, width - gap, layout.lane, op, 2 if gap else 0, shade)
        if (text := label(event)) and layout.lane >= 12:
            yield _text(left + (width - gap) / 2, y + layout.lane / 2 + 3.7, text, "box")


def _fitting_labels(timeline: Timeline, layout: _Layout) -> Callable[[Event], str]:
    """Labels such as ``F3`` if those of all computes fit, else the numbers alone where those fit.

    Of labels with versions, each compute has as much as fits: ``F3v1``, ``3v1`` or ``3``.
    """

    def fits(label: str, event: Event) -> bool:
        return len(label) * _CHARACTER_WIDTH + 2 <= (event.end - event.start) * layout.scale

    label = event_labels(timeline)
    all_fit = all(fits(label(event), event) for event in timeline.computes)

    def fitting(event: Event) -> str:
        if event.is_compute and event.instruction.version >= 0:
            whole = label(event)
            shorter = (whole, whole[1:], str(event.instruction.microbatch))
            return next((text for text in shorter if fits(text, event)), "")
        text = label(event) if all_fit or not event.is_compute else str(event.instruction.microbatch)
        return text if fits(text, event) else ""

    return fitting


def _beside(timeline: Timeline, layout: _Layout) -> Iterator[str]:
    """The bands below the lanes. Overlapping collectives share the height of their rank's band."""
    label, rows = _fitting_labels(timeline, layout), overlap_rows(timeline.overlapped)
    height = layout.band / (max(rows, default=0) + 1)
    for event, row in zip(timeline.overlapped, rows, strict=True):
        top = layout.y(event.rank) + layout.lane + 1 + row * height
        left, width = layout.x(event.start), max((event.end - event.start) * layout.scale, 1.0)
        yield _rect(left, top, width, height - 1, event.instruction.op)
        if (text := label(event)) and height > 8:
            yield _text(left + width / 2, top + height / 2 + 3, text, "small")


def _legend(timeline: Timeline, kinds: Iterable[str], layout: _Layout) -> Iterator[str]:
    x, y = layout.left, layout.bottom + 45
    for op in ops_present(timeline.columns):
        yield _rect(x, y - 10, 14, 12, op, 2)
        yield _text(x + 20, y, NAMES[op])
        x += 20 + _CHARACTER_WIDTH * len(NAMES[op]) + 20
    for kind in kinds:
        yield f'<path class="message {kind}" marker-end="url(#{kind})" d="M{_px(x)} {_px(y - 4)}h16"/>'
        yield _text(x + 22, y, kind)
        x += 22 + _CHARACTER_WIDTH * len(kind) + 20
    if max(chunk_indices(timeline).values(), default=0):
        yield _text(x, y, "lighter: a later stage of the rank")


def _rect(
    x: float, y: float, width: float, height: float, css: str, radius: int = 0, shade: float = 1.0
) -> str:
    rounded = f' rx="{radius}"' if radius else ""
    faded = f' fill-opacity="{_px(shade)}"' if shade < 1 else ""
    size = f'x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}"'
    return f'<rect class="{css}" {size}{rounded}{faded}/>'


def _text(x: float, y: float, text: str, css: str = "") -> str:
    named = f' class="{css}"' if css else ""
    return f'<text{named} x="{_px(x)}" y="{_px(y)}">{escape(text)}</text>'


def _px(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
