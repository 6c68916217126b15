"""Writes timelines to a file, in the format of its suffix."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipec.errors import InputError
from pipec.timeline.attribution import Curve
from pipec.timeline.events import Timeline
from pipec.viz.chrome import chrome_trace
from pipec.viz.drawing_checks import check_trace
from pipec.viz.html import timeline_html
from pipec.viz.svg import timeline_svg
from pipec.viz.terminal import timeline_text

SUFFIXES = (".html", ".json", ".svg", ".txt")


def write_timelines(
    path: Path,
    timelines: Mapping[str, Timeline],
    title: str = "",
    memory: Mapping[str, Sequence[Curve]] | None = None,
) -> None:
    """Draw timelines, under their names, in the format of the suffix of ``path``.

    ``.html`` is a page to explore, and ``.json`` a trace for Perfetto or chrome://tracing. Both show all
    timelines, and the ``memory`` of each rank. ``.svg`` and ``.txt`` show the last timeline alone.

    Raises:
        InputError: the path has another ending, or cannot be written.
    """
    check_drawing(path)
    match path.suffix:
        case ".html":
            drawn = timeline_html(timelines, title, memory)
        case ".json":
            drawn = chrome_trace(timelines, memory)
        case ".svg":
            drawn = timeline_svg([*timelines.values()][-1], title)
        case _:
            drawn = timeline_text([*timelines.values()][-1], title)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawn, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError for a name that no file can have
        raise InputError(f"{path} cannot be written: {error}") from error


def check_drawing(path: Path, least_events: int = 0) -> None:
    """Raise InputError unless ``write_timelines`` can draw so many events to a file of this name."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"cannot draw {path.name}: expected a name that ends in {', '.join(SUFFIXES)}")
    if path.suffix == ".json":
        check_trace(least_events)
