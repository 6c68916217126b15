"""Figures of a pipeline for loggers: what its steps took, and what was predicted of them."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from pipec.artifact.artifact import Artifact
from pipec.ir import Plan, Program
from pipec.pipeline.pipeline import Pipeline
from pipec.plan.plan_table import bytes_of_step
from pipec.plan.predictions import plan_memory, simulate_plan, step_seconds
from pipec.plan.step_memory import StepMemory
from pipec.programs.lower_periodic import steady_excerpt
from pipec.timeline.trace import Trace


def metrics(pipe: Pipeline, trace: Trace | None = None) -> dict[str, float]:
    """Numbers by name, for a logger. Nothing is measured or sent for them, and any rank may call this alone.

    Args:
        trace: what ``pipe.trace()`` gave, for the measured share of a step in which ranks are idle.

    Returns:
        ``steps`` and ``skipped_steps`` so far; ``step_seconds``, which the last ``step`` took on this rank's
        host, or the median step of a trace. Once a step was compiled, of one step as it was planned:
        ``predicted_seconds``, ``predicted_idle_share`` (the share of time in which a rank computes nothing,
        on average), ``bytes_sent`` (by all ranks, without collectives) and ``peak_bytes/rank_0`` and so on.
        With a trace ``idle_share``.
    """
    found = {"steps": float(pipe.num_steps), "skipped_steps": float(pipe.num_skipped)}
    if pipe._steps.last_seconds is not None:
        found["step_seconds"] = pipe._steps.last_seconds
    if (artifact := pipe._executions.trained) is not None:
        if artifact not in _PREDICTED:
            _PREDICTED[artifact] = _predicted(artifact)
        found |= _PREDICTED[artifact]
    if trace is not None and trace.steps:
        step = trace.median_step()
        found |= {"step_seconds": step.makespan, "idle_share": step.bubble_rate}
    return found


_PREDICTED: WeakKeyDictionary[Artifact, dict[str, float]] = WeakKeyDictionary()


def _predicted(artifact: Artifact) -> dict[str, float]:
    plan, programs = artifact.plan, artifact.representative_programs
    timeline = simulate_plan(plan, programs)
    return {
        "predicted_seconds": step_seconds(plan, timeline),
        "predicted_idle_share": timeline.bubble_rate,
        "bytes_sent": float(bytes_of_step(plan)),
        **{f"peak_bytes/rank_{each.rank}": each.peak_bytes for each in predicted_memory(plan, programs)},
    }


def predicted_memory(plan: Plan, programs: Sequence[Program]) -> StepMemory:
    """What each rank holds in a step, predicted from the programs."""
    excerpt = steady_excerpt(programs, plan.sync_spec.stream, plan.placement)
    return StepMemory(plan_memory(plan, programs), excerpt)
