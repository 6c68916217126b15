"""Views of a plan and its programs: timelines, and the memory of the ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipec.ir import Plan, Program
from pipec.plan.memory_needs import plan_memory
from pipec.plan.predictions import simulate_plan
from pipec.plan.step_memory import StepMemory
from pipec.programs.lower_periodic import steady_excerpt
from pipec.runtime.step.timestamps import RecordedStep
from pipec.timeline.events import Timeline
from pipec.timeline.trace import Trace, measured_timeline
from pipec.viz import DrawnStep, draw_steps, steps_text


def predicted_memory(plan: Plan, programs: Sequence[Program]) -> StepMemory:
    """What each rank holds in a step, predicted from the programs."""
    excerpt = steady_excerpt(programs, plan.sync_spec.stream, plan.placement)
    return StepMemory(plan_memory(plan, programs), excerpt)


def draw_timelines(
    plan: Plan, programs: Sequence[Program], timelines: Mapping[str, Timeline], path: Path | None
) -> str:
    """The timelines as text; if ``path`` is given, they are also drawn there."""
    steps = [DrawnStep.of_plan(plan, programs, timeline, name) for name, timeline in timelines.items()]
    if path is not None:
        draw_steps(path, steps)
    return steps_text(steps)


def add_recorded_steps(
    trace: Trace, plan: Plan, programs: Sequence[Program], recorded: Sequence[RecordedStep]
) -> None:
    """Put the timelines of recorded steps into a trace, and the predicted one beside them."""
    trace.simulated = simulate_plan(plan, programs)
    trace.steps += [measured_timeline(x.programs, x.timestamps, plan.sync_spec) for x in recorded]
