"""Steps as a user sees them: each a timeline with a title, drawn to a file or printed as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipec.ir import Plan, Program
from pipec.timeline.attribution import Curve, rank_memory_over_time
from pipec.timeline.events import Timeline
from pipec.viz.terminal import timeline_text
from pipec.viz.write_files import write_timelines


@dataclass(frozen=True)
class DrawnStep:
    """One step to show. ``memory`` has the bytes that each rank holds over time, where they are known.

    ``label``, such as "measured", tells apart steps of the same schedule.
    """

    schedule: str
    num_microbatches: int
    timeline: Timeline
    memory: Sequence[Curve] = ()
    label: str = ""

    @classmethod
    def of_plan(
        cls, plan: Plan, programs: Sequence[Program], timeline: Timeline, label: str = ""
    ) -> "DrawnStep":
        """A step of a plan, or the mini-batches of a stream, with the bytes that its ranks hold."""
        memory = rank_memory_over_time(plan, programs, timeline)
        microbatches = plan.num_microbatches
        if plan.sync_spec.stream:
            microbatches = int(timeline.computes.instructions.microbatches.max(initial=-1)) + 1
        return cls(plan.schedule, microbatches, timeline, memory, label)

    @property
    def name(self) -> str:
        return self.label or self.schedule

    @property
    def title(self) -> str:
        label = f"{self.label}: " if self.label else ""
        return f"{label}{self.schedule}, {self.num_microbatches} microbatches"


def draw_steps(path: Path, steps: Sequence[DrawnStep]) -> None:
    """Draw the steps to ``path``, in the format of its suffix; the first has the number of microbatches."""
    schedules = " and ".join(dict.fromkeys(step.schedule for step in steps))
    timelines = {step.name: step.timeline for step in steps}
    memory = {step.name: step.memory for step in steps if step.memory}
    write_timelines(path, timelines, f"{schedules}, {steps[0].num_microbatches} microbatches", memory)


def steps_text(steps: Sequence[DrawnStep]) -> str:
    """Each step as text under its title."""
    return "\n".join(timeline_text(step.timeline, step.title) for step in steps)
