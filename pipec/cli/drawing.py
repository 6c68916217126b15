"""What commands do with the steps they show: draw them to a file, or print them as text or JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipec.cli.output import write_stdout
from pipec.console import is_rank_zero

if TYPE_CHECKING:
    from pipec.viz import DrawnStep


def check_output(output: Path | None, least_events: int = 0) -> None:
    """Raise InputError, before anything is worked out, for a file that cannot be drawn.

    ``least_events`` are how many events it would have at least.
    """
    from pipec.viz import check_drawing

    if output is not None:
        check_drawing(output, least_events)


def draw(steps: Sequence["DrawnStep"], output: Path | None) -> None:
    """Draw the steps to ``output``, if there is one, on rank 0."""
    from pipec.viz import draw_steps

    if output is not None and is_rank_zero():
        draw_steps(output, steps)


def print_steps(steps: Sequence["DrawnStep"], output: Path | None) -> None:
    """Say where the steps were drawn to; if nowhere, print them as text."""
    from pipec.viz import steps_text

    write_stdout(f"wrote {output}\n" if output is not None else steps_text(steps))
