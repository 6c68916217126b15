"""On GPUs: one that two ranks share, and two that talk over NCCL. Skipped where there are fewer."""

import functools
from pathlib import Path

import pytest
import torch
from combinations import SIZES
from models import perceptron
from torch import nn
from unsplit import unsplit_step
from workers import run_script

import pipec

NUM_STEPS = 5


def needs_gpus(count: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} CUDA devices")


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


@needs_gpus(1)
def test_two_ranks_of_a_process_share_a_gpu() -> None:
    model, inputs = perceptron()
    pipe = pipec.compile(model, devices=2, microbatches=len(SIZES)).prepare(**inputs)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for _ in range(NUM_STEPS):
        losses.append(float(pipe.step(**inputs)))
        optimizer.step()
        optimizer.zero_grad()
    assert {parameter.device.type for parameter in pipe.parameters()} == {"cuda"}
    assert losses == pytest.approx(losses_of_autograd(), rel=1e-4)


@needs_gpus(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_gpu_allocates_what_is_predicted(recompute: str) -> None:
    """The allocator rounds up to 512 bytes, which is little of tensors of this size."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4))
    x, adam = torch.randn(1024, 512), functools.partial(torch.optim.AdamW, lr=1e-3)
    options = {"loss_fn": nn.functional.mse_loss, "microbatches": 4, "optimizer": adam}
    pipe = pipec.compile(nn.Sequential(*layers), ["cuda:0"], recompute=recompute, **options)  # type: ignore[arg-type]
    pipe.step(x, target=x)
    (measured,), (predicted,) = pipe.measure_memory(x, target=x), pipe.memory()
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)


@needs_gpus(2)
def test_two_processes_with_a_gpu_each_train_over_nccl(tmp_path: Path) -> None:
    script = Path(__file__).parent / "train.py"
    printed = run_script(script, ["perceptron", "2", str(NUM_STEPS)], 2, tmp_path)
    losses = [float.fromhex(line.split()[1]) for line in printed.splitlines() if line.startswith("loss")]
    assert losses == pytest.approx(losses_of_autograd(), rel=1e-4)
