"""Stages on several ranks: losses, gradients and buffers are those of the unsplit model, on every replica."""

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compile_variants import OPTIONS, Captured, TrainingRun, captured, save_with_tensors
from huggingface_models import Factory, each, gpt2, gpt2_with_dropout, resnet, t5
from slow_params import slow, slow_but
from torch import Tensor
from unsplit_reference import StepResult, relative_error, unsplit_step
from worker_processes import read_outcome, train

from pipec.artifact.artifact import Artifact
from pipec.compiler.staged_graph import StagedGraph
from pipec.hardware.topology import equal_devices
from pipec.ir import Payload, Schedule
from pipec.ir.batch_split import split_sizes
from pipec.passes import Pass
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.schedules import make_schedule
from pipec.schedules.replicated import replicate_schedule, round_robin

ROUNDING = 1e-6
"""Relative: gradients of replicas are summed in another order."""

PLANS = {
    "1x2": ("1f1b", 1, 2),
    "1x4": ("gpipe", 1, 4),
    "2x2": ("1f1b", 2, 2),
    "2x2 zb-h1": ("zb-h1", 2, 2),
    "2x2 zb-v": ("zb-v", 2, 2),
    "2x2 interleaved": ("interleaved-1f1b", 2, 2),
    "2x2 looped-bfs": ("looped-bfs", 2, 2),
    "4x2": ("1f1b", 4, 2),
    "2-1": (2, 1),
    "1-2": (1, 2),
    "3-1": (3, 1),
    "3-2-1": (3, 2, 1),
}
"""A schedule on so many ranks with so many replicas, or the replicas of each stage under 1F1B."""

UNEVEN = {"1x2": 3, "2x2": 5, "2-1": 5, "3-2-1": 4}
"""Microbatches of plans that have no multiple of their replicas; the others have four."""


def count_of(name: str) -> int:
    return UNEVEN.get(name, 4)


def schedule_of(name: str) -> Schedule:
    plan, count = PLANS[name], count_of(name)
    if isinstance(plan[0], str):
        return replicate_schedule(
            functools.partial(make_schedule, plan[0], int(plan[1])), count, int(plan[2])
        )
    return round_robin(count, [int(number) for number in plan])


@functools.cache
def artifact_of(model: Captured, name: str) -> Artifact:
    schedule = schedule_of(name)
    stages, rows = len(schedule.placement), model.graph.batch_size
    numbers = tuple(map(len, schedule.placement))
    how: Pass = AssignStages(CutStages(equal_devices(stages, OPTIONS.device_model.link), rows))
    if len({*numbers}) > 1:
        devices = equal_devices(schedule.num_ranks, OPTIONS.device_model.link)
        how = AssignStages(CutStages(devices, rows, replicas=numbers))
    options = replace(OPTIONS, topology=equal_devices(schedule.num_ranks, OPTIONS.device_model.link))
    return StagedGraph(model.graph, how, options).evaluate(schedule, rows).artifact()


@functools.cache
def expected(model: Captured, sizes: tuple[int, ...]) -> StepResult:
    """What a step of the unsplit model leaves. One that draws random numbers runs on one rank of pipec."""
    if model.model.config.model_type == "gpt2" and model.model.config.resid_pdrop:
        schedule = make_schedule("gpipe", 1, len(sizes))
        cut = StagedGraph(
            model.graph, AssignStages(CutStages(equal_devices(1, OPTIONS.device_model.link), 8)), OPTIONS
        )
        run = TrainingRun(cut.evaluate(schedule, 8).artifact(), model.model)
        return StepResult.of(run.step(model.inputs, sizes), run.model)
    unsplit = copy.deepcopy(model.model)
    return StepResult.of(unsplit_step(unsplit, model.inputs, [size for size in sizes if size]), unsplit)


def assert_equal(found: StepResult, model: Captured, artifact: Artifact, sizes: Sequence[int] = ()) -> None:
    """The loss and every gradient are equal but for rounding, and buffers follow their rule."""
    sizes = tuple(sizes or split_sizes(8, artifact.plan.num_microbatches))
    wanted = expected(model, sizes)
    assert relative_error(found.loss, wanted.loss) < ROUNDING
    assert found.gradients.keys() == wanted.gradients.keys()
    for fqn, gradient in found.gradients.items():
        assert relative_error(gradient, wanted.gradients[fqn]) < ROUNDING, fqn
    for fqn, buffer in agreed_buffers(model, artifact, sizes).items():
        assert relative_error(found.buffers[fqn], buffer) < ROUNDING, fqn


def agreed_buffers(model: Captured, artifact: Artifact, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """What replicas agree on that each ran the model on their own microbatches, one after the other."""
    plan = artifact.plan
    agreed = {}
    for stage in plan.stages:
        count = len(plan.placement[stage.index])
        for fqn in stage.updated_buffers:
            before = dict(model.model.named_buffers())[fqn]
            if fqn in stage.step_buffers:  # a number of batches
                agreed[fqn] = before + 1
                continue
            total = before.clone() if not before.is_floating_point() else torch.zeros_like(before)
            for k in range(count):
                own = buffers_after(model, sizes, k, count)[fqn]
                share = sum(map(bool, sizes[k::count])) / sum(map(bool, sizes))
                total += own * share if own.is_floating_point() else own - before
            agreed[fqn] = total
    return agreed


@functools.cache
def buffers_after(model: Captured, sizes: tuple[int, ...], first: int, step: int) -> dict[str, Tensor]:
    """The buffers of the unsplit model after every ``step``-th microbatch, from the first on."""
    unsplit = copy.deepcopy(model.model)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    with torch.no_grad():
        own = list(zip(starts, sizes, strict=True))[first::step]
        for start, size in (rows for rows in own if rows[1]):
            unsplit(**{name: value[start : start + size] for name, value in model.inputs.items()})
    return dict(unsplit.named_buffers())


@pytest.mark.parametrize(
    "name", slow_but(PLANS, "1x2", "1x4", "2x2", "2x2 zb-v", "2x2 looped-bfs", "2-1", "3-2-1")
)
@pytest.mark.parametrize(
    "factory", [*each(gpt2_with_dropout, resnet), *(slow(each, id=each.__name__) for each in (gpt2, t5))]
)
def test_a_step_is_that_of_the_unsplit_model(factory: Factory, name: str) -> None:
    model = captured(factory)
    artifact = artifact_of(model, name)
    sizes = split_sizes(8, count_of(name))
    outcomes = []
    for _ in range(2):
        run = TrainingRun(artifact, model.model)
        outcomes.append(StepResult.of(run.step(model.inputs, sizes), run.model))
    assert_equal(outcomes[0], model, artifact)
    assert torch.equal(outcomes[0].loss, outcomes[1].loss)
    for fqn, gradient in outcomes[0].gradients.items():
        assert torch.equal(gradient, outcomes[1].gradients[fqn]), f"{fqn} differs from run to run"


@pytest.mark.parametrize("sizes", [(4, 3, 1, 0), (5, 0, 3, 0), (0, 8, 0, 0)])
@pytest.mark.parametrize("name", ["1x4", "2x2", "2x2 zb-h1", "2x2 zb-v", "2x2 interleaved", "2x2 looped-bfs"])
@pytest.mark.parametrize("factory", [slow(gpt2, id="gpt2"), *each(resnet)])
def test_microbatches_without_rows_are_not_computed(
    factory: Factory, name: str, sizes: tuple[int, ...]
) -> None:
    """A replica has none at its end, or none at all: it gets the gradients and buffers of the others."""
    model, artifact = captured(factory), artifact_of(captured(factory), name)
    sizes = (*sizes, *[0] * (count_of(name) - len(sizes)))
    run = TrainingRun(artifact, model.model)
    found = StepResult.of(run.step(model.inputs, sizes), run.model)
    assert_equal(found, model, artifact, sizes)


@pytest.mark.slow
@pytest.mark.slow
def test_a_tied_weight_goes_between_unequal_numbers_of_replicas() -> None:
    """The case above is no empty one."""
    for name in ("2-1", "1-2", "3-2-1"):
        links = artifact_of(captured(gpt2), name).plan.links
        assert {Payload.WEIGHT, Payload.WEIGHT_GRADIENT} <= {each.payload for each in links}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "name"),
    [(gpt2, "2-1"), (gpt2_with_dropout, "3-1"), (t5, "2x2"), (resnet, "1x2"), (resnet, "1-2"), (t5, "1x4")],
)
def test_processes_are_equal_too(factory: Factory, name: str, tmp_path: Path) -> None:
    """One process per rank, over gloo."""
    model = captured(factory)
    artifact = artifact_of(model, name)
    directory = save_with_tensors(artifact, model.model, tmp_path / "artifact")
    num_ranks = artifact.plan.num_ranks
    assert train([directory] * num_ranks, model.inputs, tmp_path) == [""] * num_ranks
    found = read_outcome(tmp_path, num_ranks, replicated=True)
    if factory is not gpt2_with_dropout:  # whose seed is another one
        assert_equal(found, model, artifact)


def test_gradients_accumulate_over_steps() -> None:
    """What was summed over replicas in an earlier step is not summed again."""
    model = captured(gpt2)
    run = TrainingRun(artifact_of(model, "2-1"), model.model)
    once = TrainingRun(artifact_of(model, "2-1"), model.model)
    sizes = split_sizes(8, count_of("2-1"))
    once.step(model.inputs, sizes)
    for _ in range(3):
        run.step(model.inputs, sizes)
    for thrice, single in zip(run.model.parameters(), once.model.parameters(), strict=True):
        assert thrice.grad is not None
        assert single.grad is not None
        assert relative_error(thrice.grad, 3 * single.grad) < ROUNDING
