"""Recompute by budget: whatever the limit, ranks stay within it and gradients keep their bits."""

import functools
from dataclasses import replace

import pytest
from compile_variants import OPTIONS, SIZES, Captured, TrainingRun, captured, tied_parameters
from huggingface_models import gpt2_with_dropout
from unsplit_reference import StepResult, assert_equal

from pipec.compiler.memory_budget import fit_into_memory
from pipec.compiler.staged_graph import EvaluatedPlan, StagedGraph
from pipec.hardware.topology import equal_devices
from pipec.ir import Schedule
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule

SCHEDULES = {
    "1f1b": make_schedule("1f1b", 2, 3),
    "zb-h1": make_schedule("zb-h1", 2, 3),
    "two stages on a rank": make_schedule("zb-v", 1, 3),
    "replicas": replicate_schedule(functools.partial(make_schedule, "1f1b", 2), 4, 2),
}


def staged(schedule: Schedule, limit: float) -> StagedGraph:
    graph = captured(gpt2_with_dropout).graph
    link = OPTIONS.device_model.link
    options = replace(OPTIONS, topology=equal_devices(schedule.num_ranks, link, limit))
    return StagedGraph(
        graph, AssignStages(CutStages(equal_devices(schedule.num_stages, link), graph.batch_size)), options
    )


def fitted(schedule: Schedule, limit: float) -> EvaluatedPlan:
    return fit_into_memory(staged(schedule, limit).evaluate(schedule, max(SIZES)))


def replays(evaluated: EvaluatedPlan) -> bool:
    return any(node.meta.get("recompute") is not None for node in evaluated.staged.graph.nodes)


def outcome(evaluated: EvaluatedPlan, model: Captured) -> StepResult:
    sizes = (*SIZES, 2)[: evaluated.plan.num_microbatches]
    run = TrainingRun(evaluated.artifact(), model.model)
    return StepResult.of(run.step(model.inputs, SIZES if len(sizes) == 3 else (3, 2, 2, 1)), run.model)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_budget_is_kept_and_leaves_every_bit(name: str) -> None:
    """Dropout is on: what is drawn again is the same."""
    schedule, model = SCHEDULES[name], captured(gpt2_with_dropout)
    everything = staged(schedule, 1e12).evaluate(schedule, max(SIZES))
    least = fitted(schedule, 1.0)
    expected = outcome(everything, model)
    for share in (0.6, 0.0):
        limit = least.peak_bytes + share * (everything.peak_bytes - least.peak_bytes)
        evaluated = fitted(schedule, limit)
        assert evaluated.peak_bytes <= limit
        assert replays(evaluated)
        assert_equal(outcome(evaluated, model), expected, tied_parameters(evaluated.artifact()))
