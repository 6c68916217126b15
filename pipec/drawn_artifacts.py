"""Draws the steps of an artifact: the planned one, the typical measured one, and those of a run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from pipec.artifact.artifact import Artifact
from pipec.ir import Plan, StepPart
from pipec.ir.step_parts import plan_part, program_part
from pipec.plan.predictions import simulate_plan
from pipec.runtime.recording import Recording
from pipec.timeline.trace import Trace, measured_timeline
from pipec.viz import (
    DrawnPipeline,
    DrawnStep,
    draw_steps,
    page_html,
    steps_text,
    steps_title,
)

_MOST_STEPS = 24
"""The steps of a run that a page shows; of more, as many evenly spaced ones."""


def draw_artifact(
    artifact: Artifact, trace: Trace | None, path: Path | None, memory_limits: Sequence[float] = ()
) -> "DrawnText":
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


_SUFFIXES = {
    StepPart.WHOLE: "",
    StepPart.ACCUMULATE: " without update",
    StepPart.FORWARDS: " before the loss",
    StepPart.BACKWARDS: " behind the loss",
    StepPart.UPDATE: " update alone",
}


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


def page_in_cell(page: str) -> str:
    """A page as HTML for an output cell: a frame of its own, that shares nothing with the notebook."""
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" title="pipec timeline" '
        f'style="width: 100%; height: {_HEIGHT}px; border: 0"></iframe>'
    )


class DrawnText(str):
    """A picture as text. It prints as it is; a notebook shows the page that ``make_page`` returns."""

    make_page: Callable[[], str] | None = None

    @classmethod
    def of(cls, text: str, make_page: Callable[[], str]) -> "DrawnText":
        drawn = cls(text)
        drawn.make_page = make_page
        return drawn

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str | None:
        return page_in_cell(self.make_page()) if self.make_page else None


_HEIGHT = 640
"""The pixels that a page in an output cell is high."""
