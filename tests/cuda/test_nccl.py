"""Ranks with a GPU each, over NCCL and over copies within a process; and what a single rank can show."""

import functools
import itertools
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
from gpu_models import assert_steps_agree, token_loss, tokens, transformer
from huggingface_models import perceptron
from torch import nn
from unsplit_reference import Plain, StepResult
from worker_processes import new_store, read_outcome, run_script, start_ranks, train

import pipec
from pipec.artifact.artifact import read_artifact, write_artifact

ROOT = str(Path(__file__).parents[2])
NUM_STEPS = 5
X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 16).view(8, 2)

ALONE = """
import torch
from pipec.runtime.messages.nccl import NcclConnections

device = torch.device("cuda", 0)
store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
connections = NcclConnections(device, store, 0, 1, bool)
connections.open([], has_results=True)
number = torch.ones(4, device=device)
connections.all_reduce((0,), number)()
connections.drain()
assert number.tolist() == [1.0] * 4

busy = torch.ones(8192, 8192, device=device)
for _ in range(50):
    busy = busy @ busy
connections.all_reduce((0,), busy)
connections.close()
print("closed")
"""


@pytest.mark.slow
def test_a_group_is_aborted_while_its_gpu_is_busy(gpu: torch.device) -> None:
    """Of one rank, which waits for nobody."""
    given = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, "-c", ALONE], env={**os.environ, "PYTHONPATH": ROOT}, **given)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower(), "of groups that are left, say"
    assert done.stdout.endswith("closed\n")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b"])
def test_copies_between_gpus_are_what_eager_computes(two_devices: list[torch.device], schedule: str) -> None:
    """Over many steps: what arrives too early, or is overwritten too early, is found by chance alone."""
    model, batches = transformer().to(two_devices[0]), [tokens(16)] * 20
    assert_steps_agree(model, two_devices, batches, token_loss, microbatches=8, schedule=schedule)


@pytest.mark.slow
def test_two_processes_with_a_gpu_each_train_over_nccl(
    two_devices: list[torch.device], tmp_path: Path
) -> None:
    script = Path(__file__).parents[1] / "helpers" / "train_script.py"
    printed = run_script(script, ["perceptron", "2", str(NUM_STEPS)], 2, tmp_path)
    losses = [float.fromhex(line.split()[1]) for line in printed.splitlines() if line.startswith("loss")]
    model, inputs = perceptron()
    unsplit = Plain(model, functools.partial(torch.optim.AdamW, lr=1e-2))
    assert losses == pytest.approx([float(unsplit.step(**inputs)) for _ in range(NUM_STEPS)], rel=1e-4)


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


def train_until_killed() -> None:
    """Rank 1 is killed after some steps; rank 0 ends with the error that it sees."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    pipe = pipec.compile(model, devices=2, microbatches=4, loss_fn=nn.functional.mse_loss, timeout=240.0)
    x = torch.ones(64, 256)
    for step in itertools.count():
        pipe.step(x, target=x)
        if step == 5 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_other(two_devices: list[torch.device], tmp_path: Path) -> None:
    """Its host may wait for the GPU, where a message waits for the dead rank."""
    store = new_store()
    ranks = start_ranks(train_until_killed, [()] * 2, tmp_path, store.port)
    try:
        for process in ranks:
            process.join(200)
        assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL]
    finally:
        for process in ranks:
            process.kill()
    said = (tmp_path / "error_0").read_text()
    assert said.startswith("TransportError: ")
    assert re.search(r"rank 1\b.*(died|ended)", said), said
