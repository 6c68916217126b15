"""Every schedule runs for real, several stages on a rank and split backwards included."""

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_variants import (
    Captured,
    TrainingRun,
    captured,
    cut_evenly,
    generated,
    save_with_tensors,
    tied_parameters,
)
from huggingface_models import ROWS, Factory, each, encoder, gpt2, resnet
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from unsplit_reference import Inputs, StepResult, assert_equal, unsplit_step
from worker_processes import read_outcome, train

import pipec
from pipec.artifact.artifact import Artifact
from pipec.compiler.schedule_policy import ScheduleSource
from pipec.compiler.staged_graph import PREDICTION_TOLERANCE
from pipec.hardware.devices import DEVICES
from pipec.ir import Compute, HostCost, Phase, Schedule, one_rank_per_stage
from pipec.ir.batch_split import split_sizes
from pipec.schedules import SCHEDULES, SEARCHED_SCHEDULES, make_schedule
from pipec.schedules.named import LOOPED_SCHEDULES

pytestmark = pytest.mark.slow

SIZES = (2,) * 8
"""Twice as many microbatches as ranks, which is the least that some schedules need."""

NAMES = [*SCHEDULES, *SEARCHED_SCHEDULES]


def inputs_of(model: Captured) -> Inputs:
    """The model's rows, twice. A tensor that is two arguments stays one."""
    twice = {id(value): torch.cat([value, value]) for value in model.inputs.values()}
    return {name: twice[id(value)] for name, value in model.inputs.items()}


@functools.cache
def expected(model: Captured) -> StepResult:
    unsplit = copy.deepcopy(model.model)
    return StepResult.of(unsplit_step(unsplit, inputs_of(model), SIZES), unsplit)


@functools.cache
def compiled(model: Captured, name: str, num_ranks: int) -> Artifact:
    schedule = make_schedule(name, num_ranks, len(SIZES))
    return generated(cut_evenly(model, schedule.num_stages, recompute=False), schedule)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factory", each(gpt2, resnet))
def test_in_one_process(factory: Factory, name: str, num_ranks: int) -> None:
    model = captured(factory)
    artifact = compiled(model, name, num_ranks)
    run = TrainingRun(artifact, model.model)
    outcome = StepResult.of(run.step(inputs_of(model), SIZES), run.model)
    assert_equal(outcome, expected(model), tied_parameters(artifact))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("factory", "num_ranks"), [(gpt2, 4), (resnet, 2)])
def test_in_a_process_per_rank(factory: Factory, name: str, num_ranks: int, tmp_path: Path) -> None:
    model = captured(factory)
    artifact = compiled(model, name, num_ranks)
    directory = save_with_tensors(artifact, model.model, tmp_path / "artifact")
    assert train([directory] * num_ranks, inputs_of(model), tmp_path) == [""] * num_ranks
    found, wanted = read_outcome(tmp_path, num_ranks), expected(model)
    used = {fqn: wanted.buffers[fqn] for fqn in found.buffers}
    assert_equal(found, replace(wanted, buffers=used), tied_parameters(artifact))


@pytest.mark.parametrize("name", ["zb-h1", "interleaved-1f1b", "zb-v"])
def test_recomputing(name: str) -> None:
    """A split backward replays its forward before the input half alone."""
    model = captured(gpt2)
    schedule = make_schedule(name, 2, len(SIZES))
    artifact = generated(cut_evenly(model, schedule.num_stages, recompute=True), schedule)
    run = TrainingRun(artifact, model.model)
    outcome = StepResult.of(run.step(inputs_of(model), SIZES), run.model)
    assert_equal(outcome, expected(model), tied_parameters(artifact))


ANY_LOOPED = [f"{name}-v{v}" for name in LOOPED_SCHEDULES for v in (1, 2, 3)]


@settings(max_examples=12)
@given(
    st.sampled_from(sorted({*NAMES, *ANY_LOOPED} - LOOPED_SCHEDULES.keys())),
    st.integers(1, 4),
    st.integers(1, 8),
)
def test_any_counts_of_ranks_microbatches_and_stages_per_rank(name: str, p: int, m: int) -> None:
    """Microbatches differ in size where the rows do not divide, and many have a single row."""
    assume(not name.startswith("interleaved-1f1b") or m % p == 0)
    assume(name != "dualpipe-v" or m >= 2 * p)
    model, sizes = captured(encoder), split_sizes(ROWS, m)
    schedule = make_schedule(name, p, m)
    artifact = generated(cut_evenly(model, schedule.num_stages, recompute=False), schedule)
    run, unsplit = TrainingRun(artifact, model.model), copy.deepcopy(model.model)
    found = StepResult.of(run.step(model.inputs, sizes), run.model)
    assert_equal(found, StepResult.of(unsplit_step(unsplit, model.inputs, sizes), unsplit))


def layers() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())))


X, Y = torch.randn(32, 16), torch.randn(32, 16)


def trained(schedule: ScheduleSource, **options: Any) -> tuple[pipec.Pipeline, StepResult, StepResult]:
    """A pipeline after a step, what that left, and what autograd does with the same microbatches."""
    torch.manual_seed(0)
    model = layers()
    unsplit = copy.deepcopy(model)
    loss_fn = nn.functional.mse_loss
    pipe = pipec.compile(model, devices=2, loss_fn=loss_fn, schedule=schedule, **options)
    loss = pipe.step(X, target=Y)
    rows = 32 // pipe.plan.num_microbatches
    for x, y in zip(X.split(rows), Y.split(rows), strict=True):
        (loss_fn(unsplit(x), y) * (rows / 32)).backward()
    return pipe, StepResult.of(loss, model), StepResult.of(loss, unsplit)


@pytest.mark.parametrize("name", ["interleaved-1f1b-v3", "looped-bfs-v3"])
def test_three_stages_per_rank_by_name(name: str) -> None:
    pipe, found, wanted = trained(name, microbatches=4)
    assert (pipe.plan.schedule, pipe.plan.placement) == (name, one_rank_per_stage((0, 1)) * 3)
    assert_equal(found, wanted)
    torch.manual_seed(0)
    unsplit = layers()
    assert torch.equal(pipe(X), torch.cat([unsplit(x) for x in X.split(8)]))


def test_auto_is_no_slower_than_any_named_schedule_on_the_costs_of_the_model() -> None:
    """Each is simulated on the stages it would have. Of those about as fast the simplest is taken."""
    device = replace(DEVICES["cpu"], host=HostCost())
    makespan = {
        name: trained(name, microbatches=8, costs=device)[0].simulate().makespan
        for name in ("auto", "1f1b", "zb-v")
    }
    assert makespan["auto"] <= min(makespan.values()) * (1 + PREDICTION_TOLERANCE)


def test_a_function_of_ones_own() -> None:
    """All forwards, then the backwards in the other order."""

    def last_in_first_out(num_ranks: int, num_microbatches: int) -> Schedule:
        orders = []
        for rank in range(num_ranks):
            forwards = [Compute(Phase.FORWARD, rank, microbatch) for microbatch in range(num_microbatches)]
            orders.append((*forwards, *(replace(f, phase=Phase.BACKWARD) for f in reversed(forwards))))
        return Schedule("lifo", num_microbatches, one_rank_per_stage(range(num_ranks)), tuple(orders))

    pipe, found, wanted = trained(last_in_first_out, microbatches=4)
    assert pipe.plan.schedule == "lifo"
    assert all(torch.allclose(found.gradients[fqn], wanted.gradients[fqn]) for fqn in wanted.gradients)
