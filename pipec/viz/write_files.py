"""Writes steps to a file, in the format of its suffix."""

from collections.abc import Sequence
from pathlib import Path

from pipec.errors import InputError
from pipec.viz.chrome import chrome_trace
from pipec.viz.drawn_steps import DrawnPipeline, DrawnStep
from pipec.viz.html import page_html
from pipec.viz.svg import timeline_svg
from pipec.viz.terminal import timeline_text

SUFFIXES = (".html", ".json", ".svg", ".txt")


def draw_steps(path: Path, steps: Sequence[DrawnStep], pipeline: DrawnPipeline | None = None) -> None:
    """Draw the steps in the format of the suffix of ``path``; the first has the number of microbatches.

    ``.html`` is a page to explore, and ``.json`` a trace for Perfetto or chrome://tracing. Both show all
    steps, and the memory of each rank. ``.svg`` and ``.txt`` show one: of the first two that are not of a
    run, such as the planned and the measured step, the second.

    Raises:
        InputError: the path has another ending, or cannot be written.
    """
    check_drawing(path)
    last = [step for step in steps[:2] if not step.is_run][-1]
    match path.suffix:
        case ".html":
            drawn = page_html(steps, steps_title(steps), pipeline)
        case ".json":
            drawn = chrome_trace(steps)
        case ".svg":
            drawn = timeline_svg(last.timeline, steps_title(steps))
        case _:
            drawn = timeline_text(last.timeline, steps_title(steps))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawn, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError for a name that no file can have
        raise InputError(f"{path} cannot be written: {error}") from error


def steps_title(steps: Sequence[DrawnStep]) -> str:
    """``1f1b and zb-h1, 8 microbatches``"""
    schedules = " and ".join(dict.fromkeys(step.schedule for step in steps))
    return f"{schedules}, {steps[0].num_microbatches} microbatches"


def check_drawing(path: Path) -> None:
    """Raise InputError unless ``draw_steps`` can draw to a file of this name."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"cannot draw {path.name}: expected a name that ends in {', '.join(SUFFIXES)}")
