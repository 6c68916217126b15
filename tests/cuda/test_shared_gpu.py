"""Ranks that share one GPU compute what eager torch does."""

import contextlib
import copy
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_models import decoder, eager_step, errors, on, token_loss, tokens, vectors, wide
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pipec
from pipec.schedules import SEARCHED_SCHEDULES
from pipec.schedules.named import SCHEDULES
from tests.pipeline.test_precision import batches as mixed_batches
from tests.pipeline.test_precision import difference, pair

ROWS, MICROBATCHES = 16, 8


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, *SEARCHED_SCHEDULES])
def test_every_schedule_computes_what_eager_does(device: torch.device, schedule: str) -> None:
    expected, batch = decoder().to(device), tokens(ROWS)
    model = copy.deepcopy(expected)
    pipe = pipec.compile(
        model, [device] * 4, schedule=schedule, microbatches=MICROBATCHES, loss_fn=token_loss
    )
    loss = pipe.step(batch[0], target=batch[1])
    torch.testing.assert_close(loss, eager_step(expected, token_loss, batch, MICROBATCHES), rtol=1e-5, atol=0)
    assert max(errors(model, expected).values()) < 1e-5


@pytest.mark.slow
def test_bfloat16(device: torch.device) -> None:
    expected, batch = decoder().to(device, torch.bfloat16), tokens(ROWS)
    model = copy.deepcopy(expected)
    pipe = pipec.compile(model, [device] * 4, microbatches=MICROBATCHES, loss_fn=token_loss)
    loss = pipe.step(batch[0], target=batch[1])
    torch.testing.assert_close(loss, eager_step(expected, token_loss, batch, MICROBATCHES), rtol=2e-2, atol=0)
    assert max(errors(model, expected).values()) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_mixed_precision(device: torch.device, precision: str) -> None:
    """As eager mode under autocast; float16 with GradScaler, over a gradient that overflows."""
    pipe, eager = pair(precision, device=device)
    scales = precision == "fp16-mixed"
    for batch in mixed_batches(6, overflowing=(2,) if scales else ()):
        torch.testing.assert_close(pipe.step(**batch), eager.step(batch), rtol=2e-2, atol=0)
        assert pipe.loss_scale == (eager.scaler.get_scale() if scales else 1)
    assert difference(pipe, eager) < 1e-2


KERNELS = (
    SDPBackend.MATH,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name.lower())
def test_dropout_does_not_depend_on_stages_or_recompute(device: torch.device, kernel: SDPBackend) -> None:
    """A kernel draws for itself. What it drew in a forward is what its backward, and a replay, must find."""
    model = decoder(dropout=0.2).to(device, torch.bfloat16)
    batch, first = on(device, tokens(8)), dict[str, Tensor]()
    with sdpa_kernel(kernel):
        try:
            model(batch[0]).sum().backward()
        except RuntimeError as error:
            pytest.skip(f"the kernel does not run here: {error}")
        for stages, recompute in itertools.product((1, 2, 4), ("none", "full")):
            model.zero_grad()
            pipe = pipec.compile(
                model, [device] * stages, microbatches=2, loss_fn=token_loss, recompute=recompute
            )
            torch.manual_seed(3)
            loss = pipe.step(batch[0], target=batch[1])
            found = {name: x.grad.float() for name, x in model.named_parameters() if x.grad is not None}
            found["loss"] = loss
            first = first or found
            torch.testing.assert_close(loss, first["loss"], rtol=0, atol=0)
            torch.testing.assert_close(found, first, rtol=2e-2, atol=1e-3)
    torch.manual_seed(4)
    assert float(pipe.step(batch[0], target=batch[1])) != float(loss), "nothing was drawn"


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_batch_norm(device: torch.device, recompute: str) -> None:
    """A replay updates no statistics a second time."""
    torch.manual_seed(0)
    layers = [[nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()] for _ in range(4)]
    expected = nn.Sequential(*itertools.chain(*layers), nn.Flatten(), nn.Linear(4 * 64, 3)).to(device)
    model, batch = copy.deepcopy(expected), (torch.randn(16, 4, 8, 8), torch.randn(16, 3))
    pipe = pipec.compile(model, [device] * 2, microbatches=4, loss_fn=F.mse_loss, recompute=recompute)
    loss = pipe.step(batch[0], target=batch[1])
    torch.testing.assert_close(loss, eager_step(expected, F.mse_loss, batch, 4), rtol=1e-5, atol=0)
    assert max(errors(model, expected).values()) < 1e-4


@pytest.mark.slow
def test_a_step_is_in_order_with_the_stream_of_the_script(device: torch.device) -> None:
    """The batch is made on a side stream, late; the loss is read there, and gradients are used there."""
    model, batch = wide(2, 512).to(device), on(device, vectors(64, 512))
    pipe = pipec.compile(model, [device] * 2, microbatches=4, loss_fn=F.mse_loss)
    weight = torch.eye(512, device=device)
    side = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else contextlib.nullcontext()

    def train() -> Tensor:
        losses = []
        for step in range(10):
            x = batch[0] * (step + 1)
            for _ in range(50):
                x = x @ weight
            pipe.zero_grad()
            losses.append(pipe.step(x, target=batch[1]) + 0.0)
            losses.append(sum(parameter.grad.norm() for parameter in pipe.parameters()))
            del x
        return torch.stack(losses)

    expected = train()
    if device.type == "cuda":
        torch.cuda.synchronize()
    with side:
        found = train()
    if device.type == "cuda":
        torch.cuda.synchronize()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


FRESH = """
import torch, pipec
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
pipe = pipec.compile(model, ["{device}"] * 2, microbatches=1, loss_fn=nn.functional.mse_loss)
print("loss", float(pipe.step(torch.ones(4, 8), target=torch.zeros(4, 4))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_the_first_step_of_a_process(device: torch.device, loading: str) -> None:
    """Kernels are loaded while ranks wait for each other."""
    script, environment = FRESH.format(device=device), {**os.environ, "CUDA_MODULE_LOADING": loading}
    root = str(Path(pipec.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    expected = F.mse_loss(model(torch.ones(4, 8)), torch.zeros(4, 4))
    assert float(done.stdout.split()[-1]) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_a_device_without_an_index(device: torch.device) -> None:
    """It is the first GPU, where parameters are found then."""
    model = nn.Sequential(nn.Linear(8, 4))
    pipe = pipec.compile(model, [device.type], loss_fn=F.mse_loss)
    pipe.step(torch.ones(4, 8), target=torch.zeros(4, 4))
    where = torch.device("cuda", 0) if device.type == "cuda" else torch.device("cpu")
    assert {parameter.device for parameter in pipe.parameters()} == {where}


def test_training_goes_on_after_an_evaluation(device: torch.device) -> None:
    """A second capture finds the model where the first step has put it."""
    model, batch = decoder().to(device), tokens(8)
    pipe = pipec.compile(model, [device] * 2, microbatches=2, loss_fn=token_loss)
    losses = [float(pipe.step(batch[0], target=batch[1])), float(pipe.eval_step(batch[0], target=batch[1]))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_batch_may_be_overwritten_once_a_step_has_returned(device: torch.device) -> None:
    """Also one in pinned memory, from which a busy GPU copies when the script has gone on."""
    model, (x, y) = wide(2, 512).to(device), vectors(64, 512)
    pipe = pipec.compile(model, [device] * 2, microbatches=4, loss_fn=F.mse_loss)
    expected = float(pipe.step(x, target=y))
    busy = torch.eye(4096 if device.type == "cuda" else 64, device=device)
    if device.type == "cuda":
        x, y = x.pin_memory(), y.pin_memory()
    for _ in range(50):
        busy = busy @ busy
    loss = pipe.step(x, target=y)
    for tensor in (x, y):
        tensor.zero_()
    assert float(loss) == expected
