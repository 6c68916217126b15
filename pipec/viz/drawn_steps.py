"""Steps as a user sees them: each a timeline with a title, and the pipeline that they belong to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipec.ir import Plan, Program
from pipec.timeline.curves import MemoryCurves, rank_memory_over_time
from pipec.timeline.events import Timeline
from pipec.viz.terminal import timeline_text


@dataclass(frozen=True)
class DrawnStep:
    """One step to show. ``memory`` has the bytes that each rank holds over time, where they are known.

    ``label``, such as "measured", tells apart steps of the same schedule. ``host_seconds`` pass before the
    first instruction. A step that ``is_run`` is one of many of a run, and shown in little; ``note`` says what
    was special about it.
    """

    schedule: str
    num_microbatches: int
    timeline: Timeline
    memory: Sequence[MemoryCurves] = ()
    label: str = ""
    host_seconds: float = 0.0
    is_run: bool = False
    note: str = ""

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        programs: Sequence[Program],
        timeline: Timeline,
        label: str = "",
        host_seconds: float = 0.0,
    ) -> "DrawnStep":
        """A step of a plan, or the mini-batches of a stream, with the bytes that its ranks hold."""
        memory = rank_memory_over_time(plan, programs, timeline)
        microbatches = plan.num_microbatches
        if plan.sync_spec.stream:
            microbatches = int(timeline.computes.instructions.microbatches.max(initial=-1)) + 1
        return cls(plan.schedule, microbatches, timeline, memory, label, host_seconds)

    @property
    def name(self) -> str:
        return self.label or self.schedule

    @property
    def title(self) -> str:
        label = f"{self.label}: " if self.label else ""
        count = f", {self.num_microbatches} microbatches" if self.num_microbatches else ""
        return f"{label}{self.schedule}{count}"


@dataclass(frozen=True)
class DrawnPipeline:
    """What the steps run: the plan, the program of each rank, and the code of each stage.

    ``memory_limits`` are the bytes of each rank's device, where they are known. ``notes`` tells what was
    special about steps of a run that are not shown, by their number.
    """

    plan: Plan
    programs: Sequence[Program]
    sources: Sequence[str]
    memory_limits: Sequence[float] = ()
    notes: Mapping[int, str] = field(default_factory=dict)


def steps_text(steps: Sequence[DrawnStep]) -> str:
    """Each step as text under its title; of a run the typical step alone."""
    return "\n".join(timeline_text(step.timeline, step.title) for step in steps if not step.is_run)
