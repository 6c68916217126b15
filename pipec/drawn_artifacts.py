"""Draws the steps of an artifact: the planned one, the typical measured one, and those of a run."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from pipec.artifact.artifact import Artifact
from pipec.ir import Plan, StepPart
from pipec.ir.step_parts import plan_part, program_part
from pipec.ir.text_format import text_as_html
from pipec.plan.predictions import simulate_plan
from pipec.runtime.recording import Recording
from pipec.timeline.events import Timeline
from pipec.timeline.trace import Trace, measured_timeline
from pipec.viz import (
    DrawnPipeline,
    DrawnStep,
    DrawnText,
    draw_steps,
    page_html,
    steps_text,
    steps_title,
    timeline_svg,
    timeline_text,
)

_MOST_STEPS = 24
"""The steps of a run that a page shows; of more, as many evenly spaced ones."""


def draw_artifact(
    artifact: Artifact, trace: Trace | None, path: Path | None, memory_limits: Sequence[float] = ()
) -> DrawnText:
    """The planned step, or those of a trace, as text; if ``path`` is given, they are also drawn there.

    ``memory_limits`` has the bytes of each rank's device. In a notebook the text shows the page.
    """
    plan, programs = artifact.plan, artifact.representative_programs
    trace = trace or Trace(simulate_plan(plan, programs))
    steps = trace_steps(artifact, trace)
    unrecorded = {number: note for number, note in trace.notes.items() if number not in trace.numbers}
    pipeline = DrawnPipeline(plan, programs, artifact.sources, memory_limits, unrecorded)

    def make_page() -> str:
        return page_html(steps, steps_title(steps), pipeline)

    if path is not None:
        draw_steps(path, steps, pipeline)
    return DrawnText.of(steps_text(steps), make_page)


def trace_steps(artifact: Artifact, trace: Trace) -> list[DrawnStep]:
    """The planned and the typical measured step; of several that were recorded, each in little.

    Where parts of a step were recorded, these are a planned and a measured one of each part.
    """
    plan, steps = artifact.plan, []
    for part in trace.parts or [StepPart.WHOLE]:
        own, planned = plan_part(plan, part), trace.simulated
        few = [program_part(each, plan.sync_spec, part) for each in artifact.representative_programs]
        if part is not StepPart.WHOLE:
            planned = planned and simulate_plan(own, few)
        planned_name, measured_name = (f"{name}{_SUFFIXES[part]}" for name in ("planned", "measured"))
        if trace.steps and any(trace.median_step(part) is trace.steps[k] for k in trace.of_other_plans):
            measured_name += ", of another plan"
        if planned:
            host = own.host.step_seconds
            steps.append(DrawnStep.of_plan(own, few, planned, planned_name, host_seconds=host))
        if trace.steps or not trace.simulated:
            every = [program_part(each, plan.sync_spec, part) for each in artifact.programs]
            steps.append(DrawnStep.of_plan(own, every, trace.median_step(part), measured_name))
    return steps + _run_steps(plan, trace)


_SUFFIXES = {StepPart.WHOLE: "", StepPart.ACCUMULATE: " without update", StepPart.UPDATE: " update alone"}


def _run_steps(plan: Plan, trace: Trace) -> list[DrawnStep]:
    """Of several recorded steps evenly spaced ones, and those that were special."""
    stride = -(-len(trace.steps) // _MOST_STEPS)
    numbers = trace.numbers or range(len(trace.steps))
    return [
        DrawnStep(
            plan.schedule,
            plan.num_microbatches,
            timeline,
            label=f"step {number}{_SUFFIXES[timeline.sync_spec.part]}",
            is_run=True,
            note=", ".join(
                filter(None, [trace.notes.get(number), "another plan" if k in trace.of_other_plans else ""])
            ),
        )
        for k, (timeline, number) in enumerate(zip(trace.steps, numbers, strict=True))
        if len(trace.steps) > 1 and (k % stride == 0 or number in trace.notes)
    ]


class DrawnTimeline(Timeline):
    """A timeline that a notebook shows as a picture."""

    @classmethod
    def of(cls, timeline: Timeline) -> "DrawnTimeline":
        return cls(**{each.name: getattr(timeline, each.name) for each in fields(timeline)})

    def _repr_html_(self) -> str:
        return _picture(self, "")


class DrawnTrace(Trace):
    """A trace of which a notebook shows the planned and the typical step as pictures."""

    def _repr_html_(self) -> str:
        if not self.steps:
            return text_as_html("nothing was recorded yet")
        return "\n".join(_picture(timeline, name) for name, timeline in self.timelines().items())


def _picture(timeline: Timeline, title: str) -> str:
    """A picture without scripts; of many ranks, the text."""
    if timeline.num_ranks > _MOST_RANKS:
        return text_as_html(timeline_text(timeline, title))
    return timeline_svg(timeline, title)


_MOST_RANKS = 32
"""Ranks that a picture in a notebook has."""


def add_recorded_steps(trace: Trace, artifact: Artifact, recording: Recording) -> None:
    """Put the timelines of recorded steps into a trace, and beside them the one predicted for an artifact."""
    plan = artifact.plan
    trace.simulated = simulate_plan(plan, artifact.representative_programs)
    for step, ran in zip(recording.steps, recording.artifacts, strict=True):
        if ran is None or ran.plan != plan:
            trace.of_other_plans.add(len(trace.steps))
        sync_spec = replace(plan.sync_spec, part=step.part)
        trace.steps.append(measured_timeline(step.programs, step.timestamps, sync_spec))
    trace.numbers += recording.numbers
    trace.notes |= recording.notes
