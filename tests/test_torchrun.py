"""Several processes: a whole script under torchrun has the losses of one process, and no rank fails alone."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from combinations import Combination, TrainingRun, captured, compiled, save_with_tensors
from models import gpt2
from workers import train

ADAMW_STEPS = 20


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
