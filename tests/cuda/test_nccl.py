"""Ranks with a GPU each, over NCCL and over copies within a process; and what a single rank can show."""

import copy
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from compile_variants import SIZES
from gpu_models import decoder, eager_step, errors, token_loss, tokens
from huggingface_models import perceptron
from torch import nn
from unsplit_reference import StepResult, unsplit_step
from worker_processes import read_outcome, run_script, train

import pipec
from pipec.artifact.artifact import read_artifact, write_artifact

HERE = Path(__file__).parent
ROOT = str(HERE.parent.parent)
NUM_STEPS = 5
X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 16).view(8, 2)


@pytest.mark.slow
def test_a_rank_that_is_told_of_a_failure_closes_soon(gpu: torch.device) -> None:
    """Its abort waits for the GPU, which is busy; a drain notices within the interval of its watcher."""
    done = subprocess.run(
        [sys.executable, HERE / "single_rank_nccl_script.py"],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower(), "of groups that are left, say"
    assert float(done.stdout.split()[-1]) < 5


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"])
def test_copies_between_gpus_are_what_eager_computes(two_devices: list[torch.device], schedule: str) -> None:
    """Over many steps: what arrives too early, or is overwritten too early, is found by chance alone."""
    expected, batch = decoder(), tokens(16)
    model, expected = copy.deepcopy(expected), expected.to(two_devices[0])
    pipe = pipec.compile(model, two_devices, schedule=schedule, microbatches=8, loss_fn=token_loss)
    for _ in range(20):
        pipe.zero_grad()
        expected.zero_grad()
        loss = pipe.step(batch[0], target=batch[1])
        reference = eager_step(expected, token_loss, batch, 8)
        torch.testing.assert_close(loss.cpu(), reference.cpu(), rtol=1e-5, atol=0)
        assert max(errors(model, expected).values()) < 1e-4


def losses_of_autograd() -> list[float]:
    """Of the unsplit model, trained on the CPU."""
    model, inputs = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(NUM_STEPS):
        losses.append(float(unsplit_step(model, inputs, SIZES)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
def test_two_processes_with_a_gpu_each_train_over_nccl(
    two_devices: list[torch.device], tmp_path: Path
) -> None:
    script = HERE.parent / "helpers" / "train_script.py"
    printed = run_script(script, ["perceptron", "2", str(NUM_STEPS)], 2, tmp_path)
    losses = [float.fromhex(line.split()[1]) for line in printed.splitlines() if line.startswith("loss")]
    assert losses == pytest.approx(losses_of_autograd(), rel=1e-4)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """Two stages with their tensors, compiled without a GPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    pipe = pipec.compile(model, ["cpu"] * 2, loss_fn=nn.functional.mse_loss, microbatches=4)
    pipe.prepare(input=X, target=Y).save(tmp_path / "artifact", tensors=True)
    return tmp_path / "artifact"


@pytest.mark.slow
def test_two_processes_train_as_one_does(
    two_devices: list[torch.device], artifact: Path, tmp_path: Path
) -> None:
    assert train([artifact] * 2, {"input": X, "target": Y}, tmp_path) == ["", ""]
    found = read_outcome(tmp_path, 2)
    alone = pipec.load(artifact, ["cpu"] * 2)
    expected = StepResult.of(alone.step(input=X, target=Y), alone)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(dict(found.gradients), dict(expected.gradients))


@pytest.mark.slow
def test_a_failing_rank_fails_the_other_with_its_error(
    two_devices: list[torch.device], artifact: Path, tmp_path: Path
) -> None:
    broken, _ = read_artifact(artifact)
    source = re.sub(r"(def backward\(.*\):\n)", r'\1    raise ValueError("broken")\n', broken.sources[1])
    tensors = safetensors.torch.load_file(artifact / "tensors.safetensors")
    write_artifact(replace(broken, sources=(broken.sources[0], source)), artifact, tensors)
    first, failed = train([artifact] * 2, {"input": X, "target": Y}, tmp_path)
    assert failed.startswith("ExecutionError: rank 1, stage 1, microbatch 0, backward: ValueError: broken")
    assert first.startswith("TransportError: rank 0")
    assert "ValueError: broken" in first


ENDLESS = """
import os, torch, pipec
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
pipe = pipec.compile(model, devices=2, microbatches=4, loss_fn=nn.functional.mse_loss, timeout=240.0)
x = torch.ones(64, 256)
for step in range(10**9):
    pipe.step(x, target=x)
    if step == 5:
        print("trains", os.getpid(), flush=True)
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_other(two_devices: list[torch.device], tmp_path: Path) -> None:
    """Its host may wait for the GPU, where a message waits for the dead rank."""
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env={
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": ROOT},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)},
                **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert any(line.startswith("trains") for line in rank.stdout), "it ended before it was killed"
        ranks[1].send_signal(signal.SIGKILL)
        _, said = ranks[0].communicate(timeout=100)
        assert "TransportError" in said
        assert "rank 1: its process died" in said
    finally:
        for rank in ranks:
            rank.kill()
