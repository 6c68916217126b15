"""A timeline for the terminal: one row per rank, time from left to right, in a few panels if it is long.

Collectives stand in rows of their own, below that of their rank.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipec.ir.columns import Floats
from pipec.timeline.attribution import attribute_waits
from pipec.timeline.events import Event, Events, Timeline
from pipec.viz.bottleneck import bottleneck_lines
from pipec.viz.labels import (
    LETTERS,
    NAMES,
    chunk_indices,
    event_labels,
    lane_name,
    ops_present,
    overlap_rows,
    summary,
    time_axis,
)

_WIDTH = 144
"""A panel has at most so many columns of time."""

_PANELS = 4
"""At most so many panels. A timeline that needs more is compressed into one, where most labels do not fit."""

_LEAST_CELL = 3
"""The shortest label and a blank take so many columns."""

_IDLE = "·"
_FILL = "─"


@dataclass(frozen=True, slots=True)
class _Panel:
    """The part of the timeline from ``start`` to ``end``; a unit of time is ``columns`` wide."""

    start: float
    end: float
    columns: float

    def column(self, time: float) -> int:
        return round((time - self.start) * self.columns)

    def columns_of(self, times: Floats) -> Floats:
        """The columns of many times. Those before the panel are put at its start, later ones at its end."""
        return ((times.clip(self.start, self.end) - self.start) * self.columns).round()


def timeline_text(timeline: Timeline, title: str = "") -> str:
    """The timeline as lines of text, under ``title`` and its figures of merit, above what makes it last."""
    label = event_labels(timeline)
    panels = [_panel_text(timeline, panel, label) for panel in _panels(timeline, label)]
    heading = [title, summary(timeline)] if title else [summary(timeline)]
    return "\n".join(
        [*heading, *panels, _legend(timeline), *bottleneck_lines(timeline, attribute_waits(timeline)), ""]
    )


def _panels(timeline: Timeline, label: Callable[[Event], str]) -> list[_Panel]:
    """Panels with room for the label of every cell and a blank; one panel, if those would be too many."""
    computes = timeline.computes if len(timeline.computes) else timeline.blocking
    durations = computes.ends - computes.starts
    if not durations.any():
        return [_Panel(0.0, timeline.makespan, 0.0)]
    shortest = float(durations[durations > 0].min())
    compressed = [_Panel(0.0, timeline.makespan, _WIDTH / timeline.makespan)]
    if timeline.makespan > _PANELS * (_WIDTH // _LEAST_CELL) * shortest:
        return compressed
    lengths = zip(map(label, computes), durations.tolist(), strict=True)
    columns = max((len(text) + 1) / duration for text, duration in lengths if duration > 0)
    length = max(int(_WIDTH / (columns * shortest)), 1) * shortest
    count = math.ceil(timeline.makespan / length - 1e-9)
    if count > _PANELS:
        return compressed
    return [_Panel(k * length, min((k + 1) * length, timeline.makespan), columns) for k in range(count)]


def _panel_text(timeline: Timeline, panel: _Panel, label: Callable[[Event], str]) -> str:
    names = [lane_name(timeline, rank) for rank in range(timeline.num_ranks)]
    margin = max(map(len, names))
    lines = []
    for rank, name in enumerate(names):
        lines.append(f"{name:{margin}} {_row(timeline.blocking.of_rank(rank), panel, label)}")
        beside = timeline.overlapped.of_rank(rank)
        rows = np.array(overlap_rows(beside), int)
        shown = [
            _row(beside.where(rows == row), panel, label, " ") for row in range(max(rows, default=-1) + 1)
        ]
        lines += [f"{'':{margin}} {row}" for row in shown if row]
    return "\n".join([*lines, f"{'':{margin}} {_axis(timeline, panel)}"])


def _row(events: Events, panel: _Panel, label: Callable[[Event], str], idle: str = _IDLE) -> str:
    cells = [idle] * panel.column(panel.end)
    firsts, lasts = panel.columns_of(events.starts), panel.columns_of(events.ends)
    shown = lasts > firsts
    places = firsts[shown].astype(int).tolist(), lasts[shown].astype(int).tolist()
    for event, first, last in zip(events.where(shown), *places, strict=True):
        cells[first:last] = _cell(label(event) if event.start >= panel.start else "", last - first)
    return "".join(cells).rstrip()


def _cell(label: str, width: int) -> str:
    """``label`` and a blank in ``width`` columns. Where the label does not fit, its letter stands alone."""
    if width < len(label):
        return label[:1].ljust(width, _FILL)[:width]
    return label.ljust(width - 1, _FILL).ljust(width)


def _axis(timeline: Timeline, panel: _Panel) -> str:
    unit, ticks = time_axis(timeline, most=20)
    line = ""
    for time, text in ticks:
        if panel.start <= time <= panel.end and panel.column(time) >= len(line):
            line = line.ljust(panel.column(time)) + f"{text} "
    return f"{line}{unit}"


def _legend(timeline: Timeline) -> str:
    drawn = timeline.columns.where(timeline.columns.ends > timeline.columns.starts)
    named = {*ops_present(timeline.computes), *ops_present(drawn)}
    shown = [op for op in NAMES if op in named]
    entries = "  ".join(f"{LETTERS[op]} {NAMES[op]}" for op in shown)
    several = max(chunk_indices(timeline).values(), default=0) > 0
    letters = "; letters a, b, ... are the stages of a rank" if several else ""
    buckets = ", behind Σ and G buckets" if (drawn.instructions.buckets >= 0).any() else ""
    return f"{entries}  {_IDLE} idle; numbers are microbatches{buckets}{letters}"
