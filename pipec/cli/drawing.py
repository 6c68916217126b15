"""Output of steps, shared by commands: drawn to a file, or printed as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipec.cli.output import write_stdout
from pipec.console import is_rank_zero

if TYPE_CHECKING:
    from pipec.viz import DrawnPipeline, DrawnStep


def check_output(output: Path | None) -> None:
    """Raise InputError if no drawing can be written to ``output``.

    Commands call it before they compute anything.
    """
    from pipec.viz import check_drawing

    if output is not None:
        check_drawing(output)


def draw(steps: Sequence["DrawnStep"], output: Path | None, pipeline: "DrawnPipeline | None" = None) -> None:
    """Draw the steps to ``output``, if there is one, on rank 0."""
    from pipec.viz import draw_steps

    if output is not None and is_rank_zero():
        draw_steps(output, steps, pipeline)


def print_steps(steps: Sequence["DrawnStep"], output: Path | None) -> None:
    """Print the file in which the steps were drawn or, if there is none, the steps as text."""
    from pipec.viz import steps_text

    write_stdout(f"wrote {output}\n" if output is not None else steps_text(steps))
