"""Processes have the bits of the unsplit model too: saved artifacts, and a whole script under torchrun."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from combinations import (
    COMBINATIONS,
    Combination,
    TrainingRun,
    captured,
    compiled,
    expected,
    tied_parameters,
)
from models import MODELS, Factory, each, gpt2
from torch import nn
from unsplit import assert_equal
from workers import read_outcome, train

from pipec.artifact import Artifact, save

ADAMW_STEPS = 20


def save_with_tensors(artifact: Artifact, model: nn.Module, directory: Path) -> Path:
    save(artifact, directory, {**dict(model.named_parameters()), **dict(model.named_buffers())})
    return directory


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
@pytest.mark.parametrize("factory", each(*MODELS))
def test_a_loaded_artifact_has_the_bits_of_the_unsplit_model(
    factory: Factory, combination: Combination, tmp_path: Path
) -> None:
    model = captured(factory)
    artifact = compiled(model, combination)
    directory = save_with_tensors(artifact, model.model, tmp_path / "artifact")
    num_ranks = combination.num_stages
    assert train([directory] * num_ranks, model.inputs, tmp_path) == [""] * num_ranks
    found, wanted = read_outcome(tmp_path, num_ranks), expected(model)
    assert {value.name for value in artifact.plan.buffers} - artifact.constants.keys() == found.buffers.keys()
    used = {fqn: wanted.buffers[fqn] for fqn in found.buffers}
    assert_equal(found, replace(wanted, buffers=used), tied_parameters(artifact))


def test_a_stage_that_fails_fails_every_rank_with_its_error(tmp_path: Path) -> None:
    model = captured(gpt2)
    artifact = compiled(model, Combination(2, "1f1b", "none"))
    first, last = artifact.sources
    broken = replace(artifact, sources=(first, last.replace("    saved.clear()\n", "    saved.sort(0)\n", 1)))
    directory = save_with_tensors(broken, model.model, tmp_path / "artifact")
    errors = train([directory] * 2, model.inputs, tmp_path)
    original = "rank 1, stage 1, microbatch 0, backward: TypeError: sort() takes no positional arguments ("
    assert errors[1].startswith(f"ExecutionError: {original}")
    assert errors[0].startswith(
        "TransportError: rank 0, stage 0, microbatch 0, backward: another rank failed while"
    )
    assert original in errors[0]


def test_ranks_that_load_different_artifacts_refuse_to_run(tmp_path: Path) -> None:
    model = captured(gpt2)
    directories = [
        save_with_tensors(compiled(model, Combination(2, schedule, "none")), model.model, tmp_path / schedule)
        for schedule in ("gpipe", "1f1b")
    ]
    errors = train(directories, model.inputs, tmp_path)
    for error in errors:
        assert error.startswith(
            "TransportError: the ranks do not hold the same plan, programs and stage sources: "
        )


def test_a_script_under_torchrun_prints_the_losses_of_one_process() -> None:
    model = captured(gpt2)
    run = TrainingRun(compiled(model, Combination(4, "1f1b", "none")), model.model)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(ADAMW_STEPS):
        losses.append(f"loss {float(run.step(model.inputs)).hex()}")
        optimizer.step()
        optimizer.zero_grad()
    tests = Path(__file__).parent
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    path = os.pathsep.join([str(tests.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*torchrun, tests / "train_gpt2.py", str(ADAMW_STEPS)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("loss")] == losses
