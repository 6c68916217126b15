"""Views of a plan and its programs that a pipeline returns."""

from collections.abc import Sequence

from pipec.ir import Plan, Program
from pipec.plan.memory_needs import plan_memory
from pipec.plan.step_memory import StepMemory
from pipec.programs.lower_periodic import steady_excerpt


def predicted_memory(plan: Plan, programs: Sequence[Program]) -> StepMemory:
    """What each rank holds in a step, predicted from the programs."""
    excerpt = steady_excerpt(programs, plan.sync_spec.stream, plan.placement)
    return StepMemory(plan_memory(plan, programs), excerpt)
