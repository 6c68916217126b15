"""Draws the steps of an artifact: the planned one, the typical measured one, and those of a run."""

from collections.abc import Sequence
from pathlib import Path

from pipec.artifact.artifact import Artifact
from pipec.plan.predictions import simulate_plan
from pipec.plan.what_if import what_if_of_plan
from pipec.runtime.step.timestamps import RecordedStep
from pipec.timeline.trace import Trace, measured_timeline
from pipec.viz import DrawnPipeline, DrawnStep, DrawnText, draw_steps, page_html, steps_text, steps_title

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
    pipeline = DrawnPipeline(plan, programs, artifact.sources, memory_limits)
    planned = trace.simulated or simulate_plan(plan, programs)

    def make_page() -> str:
        return page_html(steps, steps_title(steps), pipeline, what_if_of_plan(plan, programs, planned))

    if path is not None:
        what_if = what_if_of_plan(plan, programs, planned) if path.suffix == ".html" else None
        draw_steps(path, steps, pipeline, what_if)
    return DrawnText.of(steps_text(steps), make_page)


def trace_steps(artifact: Artifact, trace: Trace) -> list[DrawnStep]:
    """The planned and the typical measured step; of several that were recorded, each in little."""
    plan, host = artifact.plan, artifact.plan.host.step_seconds
    steps = []
    if trace.simulated:
        few = artifact.representative_programs
        steps.append(DrawnStep.of_plan(plan, few, trace.simulated, "planned", host_seconds=host))
    if trace.steps or not trace.simulated:
        steps.append(DrawnStep.of_plan(plan, artifact.programs, trace.median_step(), "measured"))
    if len(trace.steps) > 1:
        stride = -(-len(trace.steps) // _MOST_STEPS)
        numbers = trace.numbers or range(len(trace.steps))
        notes = trace.notes or [""] * len(trace.steps)
        steps += [
            DrawnStep(
                plan.schedule,
                plan.num_microbatches,
                timeline,
                label=f"step {number}",
                is_run=True,
                note=note,
            )
            for k, (timeline, number, note) in enumerate(zip(trace.steps, numbers, notes, strict=True))
            if k % stride == 0 or note
        ]
    return steps


def add_recorded_steps(
    trace: Trace,
    artifact: Artifact,
    recorded: Sequence[RecordedStep],
    first: int = 0,
    note: str = "",
) -> None:
    """Put the timelines of recorded steps into a trace, and the predicted one beside them.

    ``first`` is the number of the first of them, and ``note`` what was special about them.
    """
    plan = artifact.plan
    trace.simulated = simulate_plan(plan, artifact.representative_programs)
    trace.steps += [measured_timeline(x.programs, x.timestamps, plan.sync_spec) for x in recorded]
    trace.numbers += range(first, first + len(recorded))
    trace.notes += [note, *[""] * (len(recorded) - 1)][: len(recorded)]
