"""Steps as commands show them: their timelines drawn to a file, or printed as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipec.cli.output import say
from pipec.console import is_rank_zero

if TYPE_CHECKING:
    from pipec.timeline.attribution import Curve
    from pipec.timeline.events import Timeline


@dataclass(frozen=True)
class Step:
    """One step to show.

    ``memory`` has the bytes that each rank holds over time, and ``facts`` is more to tell in JSON, where
    they are known. ``label`` tells steps of the same schedule apart.
    """

    schedule: str
    num_microbatches: int
    timeline: "Timeline"
    memory: Sequence["Curve"] = ()
    facts: Mapping[str, object] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.schedule

    @property
    def title(self) -> str:
        label = f"{self.label}: " if self.label else ""
        return f"{label}{self.schedule}, {self.num_microbatches} microbatches"


def check_output(output: Path | None) -> None:
    """Raise InputError for a file that cannot be drawn, before anything is worked out."""
    from pipec.viz import check_suffix

    if output is not None:
        check_suffix(output)


def draw(steps: Sequence[Step], output: Path | None) -> None:
    """Write the steps to ``output``, if there is one, on rank 0; the first says how many microbatches."""
    from pipec.viz import write_timelines

    if output is not None and is_rank_zero():
        schedules = " and ".join(dict.fromkeys(step.schedule for step in steps))
        timelines = {step.name: step.timeline for step in steps}
        memory = {step.name: step.memory for step in steps if step.memory}
        write_timelines(output, timelines, f"{schedules}, {steps[0].num_microbatches} microbatches", memory)


def show_drawn(steps: Sequence[Step], output: Path | None) -> None:
    """Say where the steps were drawn to; if nowhere, print them as text."""
    from pipec.viz import timeline_text

    if output is not None:
        say(f"wrote {output}\n")
    else:
        say("\n".join(timeline_text(step.timeline, step.title) for step in steps))


def step_facts(step: Step) -> dict[str, object]:
    """The step as JSON: its schedule, its own facts, and those of its timeline."""
    from pipec.timeline.facts import timeline_facts

    named = {"schedule": step.schedule, "num_microbatches": step.num_microbatches}
    return {**named, **step.facts, **timeline_facts(step.timeline)}
