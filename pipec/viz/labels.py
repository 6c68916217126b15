"""The words and numbers that every picture of a timeline shares."""

import math
from collections.abc import Callable, Mapping

from pipec.ir import Phase
from pipec.ir.text import PHASE_LETTERS, format_seconds
from pipec.timeline.events import Event, Timeline

NAMES: Mapping[Phase, str] = {
    Phase.FORWARD: "forward",
    Phase.RECOMPUTE: "recompute",
    Phase.BACKWARD: "backward",
    Phase.BACKWARD_INPUT: "input gradient",
    Phase.BACKWARD_WEIGHT: "weight gradient",
}


def phases(timeline: Timeline) -> list[Phase]:
    """The phases that run, in the order of ``NAMES``."""
    return [phase for phase in NAMES if phase in timeline.phases]


def chunks(timeline: Timeline) -> dict[int, int]:
    """The place of each stage among the stages of its rank, from 0."""
    return {stage: chunk for held in timeline.stages for chunk, stage in enumerate(held)}


def cell_labels(timeline: Timeline) -> Callable[[Event], str]:
    """How computes are labelled: ``F3`` is the forward of microbatch 3.

    If ranks hold several stages, ``Fb3`` is the forward of the second stage of its rank.
    """
    chunk_of = chunks(timeline)
    several = max(chunk_of.values(), default=0) > 0

    def label(event: Event) -> str:
        instruction = event.instruction
        assert instruction.op.phase
        chunk = chr(ord("a") + chunk_of[instruction.stage] % 26) if several else ""
        return f"{PHASE_LETTERS[instruction.op.phase]}{chunk}{instruction.microbatch}"

    return label


def summary(timeline: Timeline) -> str:
    """The figures of merit on one line."""
    times = f"makespan {duration(timeline.makespan, timeline)}, span {duration(timeline.span, timeline)}"
    rates = f"bubble {timeline.bubble_rate:.1%}"
    if timeline.overhead_rate - timeline.bubble_rate > 5e-4:
        rates += f" ({timeline.overhead_rate:.1%} if recomputing counts as idle)"
    return f"{rates}, {times}, at most {max(timeline.peak_in_flight, default=0)} in flight"


def duration(time: float, timeline: Timeline) -> str:
    """``time`` with its unit."""
    return format_seconds(time) if timeline.unit == "s" else f"{time:.6g} {timeline.unit}"


def time_axis(timeline: Timeline, most: int) -> tuple[str, list[tuple[float, str]]]:
    """The unit of the time axis, and about ``most`` ticks at round numbers, each a time and its text."""
    factor, unit = 1.0, timeline.unit
    if unit == "s":
        scales = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
        factor, unit = next((scale for scale in scales if timeline.makespan >= scale[0]), (1e-9, "ns"))
    end = timeline.makespan / factor
    step = _round_step(end / most) if end else 1.0
    return unit, [(k * step * factor, f"{k * step:g}") for k in range(int(end / step + 1e-9) + 1)]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
