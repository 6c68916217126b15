"""Placement does not change the result: every model, cut in every way, has the bits of the unsplit model."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_variants import (
    OPTIONS,
    SIZES,
    VARIANTS,
    TrainingRun,
    Variant,
    captured,
    compiled,
    cut,
    expected,
    generated,
    pipeline,
    save_with_tensors,
    tied_parameters,
)
from huggingface_models import MODELS, Factory, each, gpt2, llama, resnet
from torch import nn
from unsplit_reference import Inputs, StepResult, assert_equal, unsplit_step
from worker_processes import read_outcome, run_script, train

from pipec.compiler import pass_list
from pipec.hardware.topology import equal_devices
from pipec.passes import Pass
from pipec.passes.assign_stages import AssignStages
from pipec.passes.assignments.cut_stages import CutStages
from pipec.passes.merge_slice_gradients import MergeSliceGradients
from pipec.passes.precompute_weights import PrecomputeWeights
from pipec.passes.simplify import Simplify
from pipec.schedules import make_schedule

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("combination", VARIANTS, ids=str)
@pytest.mark.parametrize("factory", each(*MODELS))
def test_a_step_has_the_bits_of_the_unsplit_model(factory: Factory, combination: Variant) -> None:
    model = captured(factory)
    artifact = compiled(model, combination)
    run = TrainingRun(artifact, model.model)
    outcome = StepResult.of(run.step(model.inputs), run.model)
    assert_equal(outcome, expected(model), tied_parameters(artifact))


@pytest.mark.parametrize("left_out", [Simplify, MergeSliceGradients, PrecomputeWeights])
@pytest.mark.parametrize("factory", each(llama, resnet))
def test_no_pass_changes_a_bit(factory: Factory, left_out: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model, every = captured(factory), pass_list.make_passes

    def others(*args: Any) -> list[Pass]:
        return [each for each in every(*args) if not isinstance(each, left_out)]

    monkeypatch.setattr(pass_list, "make_passes", others)
    how = AssignStages(CutStages(equal_devices(2, OPTIONS.device_model.link), model.graph.batch_size))
    artifact = generated(cut(model, how, frozenset()), make_schedule("1f1b", 2, len(SIZES)))
    run = TrainingRun(artifact, model.model)
    assert_equal(StepResult.of(run.step(model.inputs), run.model), expected(model), tied_parameters(artifact))


@pytest.mark.parametrize("combination", VARIANTS, ids=str)
@pytest.mark.parametrize("factory", each(gpt2, resnet))
def test_a_loaded_artifact_has_the_bits_of_the_unsplit_model(
    factory: Factory, combination: Variant, tmp_path: Path
) -> None:
    """One process per rank, over gloo."""
    model = captured(factory)
    artifact = compiled(model, combination)
    directory = save_with_tensors(artifact, model.model, tmp_path / "artifact")
    num_ranks = combination.num_stages
    errors = train([directory] * num_ranks, model.inputs, tmp_path)
    assert not any(errors), "\n\n".join(errors)
    found, wanted = read_outcome(tmp_path, num_ranks), expected(model)
    assert {value.name for value in artifact.plan.buffers} - artifact.constants.keys() == found.buffers.keys()
    used = {fqn: wanted.buffers[fqn] for fqn in found.buffers}
    assert_equal(found, replace(wanted, buffers=used), tied_parameters(artifact))


@pytest.mark.parametrize("factory", each(*MODELS))
def test_two_steps_of_a_compiled_model_accumulate_gradients(factory: Factory) -> None:
    pipe, trained, model = pipeline(factory)
    pipe.train().zero_grad()
    unsplit = copy.deepcopy(trained)
    for _ in range(2):
        found = pipe.step(**model.inputs)
        loss = unsplit_step(unsplit, model.inputs, SIZES)
    assert_equal(StepResult.of(found, trained), StepResult.of(loss, unsplit), tied_parameters(pipe._artifact))
    pipe.zero_grad()
    assert all(parameter.grad is None for parameter in trained.parameters())


ADAMW_STEPS = 20


def batches(inputs: Inputs) -> Iterator[Inputs]:
    for number in range(ADAMW_STEPS):
        yield {name: value.roll(number, dims=0) for name, value in inputs.items()}


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("factory", each(llama, resnet))
def test_twenty_steps_of_adamw_stay_equal(factory: Factory) -> None:
    model = captured(factory)
    run = TrainingRun(compiled(model, Variant(4, "1f1b", "none")), model.model)
    unsplit = copy.deepcopy(model.model)
    optimizers = [torch.optim.AdamW(trained.parameters(), lr=1e-2) for trained in (run.model, unsplit)]
    for inputs in batches(model.inputs):
        losses = run.step(inputs), unsplit_step(unsplit, inputs, SIZES)
        for optimizer in optimizers:
            update(optimizer)
        assert_equal(StepResult.of(losses[0], run.model), StepResult.of(losses[1], unsplit))


def test_twenty_steps_stay_equal_to_a_model_that_sums_the_gradients_of_each_use_of_a_tied_weight() -> None:
    """Nothing but the order of that sum differs: embedding and head are apart, as two stages hold them."""
    model = captured(gpt2)
    artifact = compiled(model, Variant(4, "1f1b", "none"))
    assert tied_parameters(artifact) == {"transformer.wte.weight"}
    run, unsplit = TrainingRun(artifact, model.model), copy.deepcopy(model.model)
    embedding, head = unsplit.transformer.wte.weight, nn.Parameter(unsplit.lm_head.weight.detach().clone())
    tied = list(unsplit.parameters())
    unsplit.lm_head.weight = head
    optimizers = [torch.optim.AdamW(trained, lr=1e-2) for trained in (run.model.parameters(), tied)]
    for inputs in batches(model.inputs):
        losses = run.step(inputs), unsplit_step(unsplit, inputs, SIZES)
        embedding.grad += head.grad
        head.grad = None
        for optimizer in optimizers:
            update(optimizer)
        head.data.copy_(embedding)
        assert torch.equal(*losses)
        assert all(map(torch.equal, run.model.parameters(), tied))


def test_a_script_on_four_ranks_prints_the_losses_of_one_process(tmp_path: Path) -> None:
    model = captured(gpt2)
    run = TrainingRun(compiled(model, Variant(4, "1f1b", "none")), model.model)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(ADAMW_STEPS):
        losses.append(f"loss {float(run.step(model.inputs)).hex()}")
        optimizer.step()
        optimizer.zero_grad()
    script = Path(__file__).parents[1] / "helpers" / "train_script.py"
    printed = run_script(script, ["gpt2", "4", str(ADAMW_STEPS)], 4, tmp_path)
    assert [line for line in printed.splitlines() if line.startswith("loss")] == losses
