"""Trainings on GPUs that ranks share, against eager torch or the same step without an option."""

import contextlib
import copy
import functools
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from equality_rows import Row, covering, difference
from gpu_models import assert_steps_agree, on, token_loss, tokens, transformer, vectors, wide
from huggingface_models import bert
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pipec
from tests.pipeline import test_precision as mixed
from zoo.layers import first_output

FUSED = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-3, fused=True)  # divides no rounding by itself

ROOT = Path(__file__).parents[2]
ROWS = [
    row
    for row in covering()
    if row.precision is None and row.model != "dropout" and row.update != "muon" and row.run != "saved"
]
"""Rows whose numbers on the CPU are those on a GPU: nothing is drawn, and nothing computed in bfloat16."""


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS[:32], ids=str)
def test_a_row_trains_as_eager_torch_on_the_cpu(device: torch.device, row: Row) -> None:
    found = difference(row, devices=[device] * row.devices)
    assert not found, found


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [[nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()] for _ in range(3)]
    first, last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 64, 5)
    return nn.Sequential(first, *itertools.chain(*layers), nn.Flatten(), last)


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    torch.manual_seed(0)
    layers = (kind(128, 64, batch_first=True, bidirectional=True, bias=biased) for biased in (True, False))
    return nn.Sequential(*map(first_output, layers))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention(device: torch.device, dtype: torch.dtype) -> None:
    """Batches of many lengths: each is padded to its longest row, and none is compiled on its own."""
    lengths = (16, 11, 13, 16, 7, 12)
    batches = [{name: x[:, :length].contiguous() for name, x in tokens(16).items()} for length in lengths]
    tolerances = {"rtol": 1e-5, "error": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "error": 2e-2}
    options = {"microbatches": 8, "schedule": "zb-h1", **tolerances}
    assert_steps_agree(transformer().to(device, dtype), [device] * 4, batches, token_loss, **options)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
def test_convolutions_and_batch_norm(device: torch.device, precision: str | None, recompute: str) -> None:
    """Convolutions run in bfloat16, and statistics are kept in float32. A replay updates none of them."""
    batch = {"input": vectors(16, 3, 8, 8)["input"], "target": torch.arange(16) % 5}
    options = {"recompute": recompute}
    if precision:
        options |= {"precision": precision, "rtol": 2e-2, "error": 5e-2}
    assert_steps_agree(convolutions().to(device), [device] * 2, [batch], F.cross_entropy, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_those_of_eager_torch(
    device: torch.device, caplog: pytest.LogCaptureFixture, kind: type[nn.RNNBase]
) -> None:
    """Dynamo traces them, and cuts fall between layers."""
    expected, batch = recurrent(kind).to(device), on(device, vectors(16, 12, 128))
    pipe = assert_steps_agree(expected, [device] * 2, [batch], F.mse_loss, rtol=1e-4, error=1e-3)
    assert all("primitives.RECURRENT_LAYER(" in pipe.source(rank) for rank in range(2))
    assert "Dynamo cannot trace" not in caplog.text
    with torch.no_grad():
        x = batch["input"]
        torch.testing.assert_close(pipe(x), expected(x), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="inductor needs a C compiler")
def test_compiled_kernels(device: torch.device, recwarn: pytest.WarningsRecorder) -> None:
    """Of every phase; dropout and attention draw what the source draws, from its seed."""
    losses = []
    for kernels in ("source", "inductor"):
        model, batch = transformer(dropout=0.1).to(device), on(device, tokens(8))
        pipe = pipec.compile(model, [device] * 2, microbatches=2, loss_fn=token_loss, kernels=kernels)
        torch.manual_seed(3)
        losses.append([float(pipe.step(**batch)) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert not [each for each in recwarn if "cannot compile" in str(each.message)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offloaded_values_of_random_operators(device: torch.device, dtype: torch.dtype) -> None:
    """Attention that draws leaves the state of its generator on the host, where the backward reads it."""
    model, batch = transformer(dropout=0.2).to(device, dtype), on(device, tokens(64))
    options: dict[str, Any] = {"schedule": "gpipe", "microbatches": 8, "loss_fn": token_loss}
    free = pipec.compile(copy.deepcopy(model), [device], **options)
    torch.manual_seed(3)
    expected = [float(free.step(**batch)) for _ in range(2)]
    limit = int(0.7 * free.memory().peak_bytes)
    options |= {"memory_limit": limit, "offload": "activations", "recompute": "none"}
    pipe = pipec.compile(model, [device], **options)
    torch.manual_seed(3)
    assert [float(pipe.step(**batch)) for _ in range(2)] == expected
    assert pipe.plan.offloading_stages
    mine, theirs = ({name: x.grad for name, x in each.named_parameters()} for each in (pipe, free))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.slow
def test_rows_of_different_lengths(device: torch.device) -> None:
    """A padding mask of transformers, in bfloat16."""
    model, batch = bert()
    model.to(device, torch.bfloat16)
    assert_steps_agree(model, [device] * 4, [on(device, batch)], rtol=2e-2, error=5e-2)


@pytest.mark.slow
def test_a_checkpoint_that_is_written_while_training_goes_on(device: torch.device, tmp_path: Path) -> None:
    """What is saved is the state at the call, and not that of the steps behind it."""
    batch, options = on(device, tokens(8)), {"microbatches": 2, "loss_fn": token_loss, "optimizer": FUSED}
    pipe, other = (pipec.compile(transformer().to(device), [device] * 2, **options) for _ in range(2))
    pipe.step(**batch)
    saving = pipe.save_checkpoint(tmp_path / "checkpoint", asynchronous=True)
    expected = [float(pipe.step(**batch)) for _ in range(3)]
    saving.result()
    other.load_checkpoint(tmp_path / "checkpoint")
    assert [float(other.step(**batch)) for _ in range(3)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_mixed_precision(device: torch.device, precision: str) -> None:
    """As eager mode under autocast; float16 with GradScaler, over a gradient that overflows."""
    pipe, eager = mixed.pair(precision, device=device)
    scales = precision == "fp16-mixed"
    for batch in mixed.batches(6, overflowing=(2,) if scales else ()):
        torch.testing.assert_close(pipe.step(**batch), eager.step(**batch), rtol=2e-2, atol=0)
        assert pipe.loss_scale == (eager.scaler.get_scale() if scales else 1)
    assert mixed.difference(pipe, eager) < 1e-2


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
    model = transformer(dropout=0.2).to(device, torch.bfloat16)
    batch, first = on(device, tokens(8)), dict[str, Tensor]()
    options = {"microbatches": 2, "loss_fn": token_loss}
    with sdpa_kernel(kernel):
        try:
            model(batch["input"]).sum().backward()
        except RuntimeError as error:
            pytest.skip(f"the kernel does not run here: {error}")
        for stages, recompute in itertools.product((1, 2, 4), ("none", "full")):
            model.zero_grad()
            pipe = pipec.compile(model, [device] * stages, recompute=recompute, **options)
            torch.manual_seed(3)
            loss = pipe.step(**batch)
            found = {name: x.grad.float() for name, x in model.named_parameters() if x.grad is not None}
            found["loss"] = loss
            first = first or found
            torch.testing.assert_close(loss, first["loss"], rtol=0, atol=0)
            torch.testing.assert_close(found, first, rtol=2e-2, atol=1e-3)
    torch.manual_seed(4)
    assert float(pipe.step(**batch)) != float(loss), "nothing was drawn"


@pytest.mark.slow
def test_a_step_is_in_order_with_the_stream_of_the_script(device: torch.device) -> None:
    """The batch is made on a side stream, late; the loss is read there, and gradients are used there."""
    model, batch = wide(2, 512).to(device), on(device, vectors(64, 512))
    pipe = pipec.compile(model, [device] * 2, microbatches=4, loss_fn=F.mse_loss)
    weight, is_cuda = torch.eye(512, device=device), device.type == "cuda"

    def train() -> Tensor:
        losses = []
        for step in range(10):
            x = batch["input"] * (step + 1)
            for _ in range(50):
                x = x @ weight
            pipe.zero_grad()
            losses.append(pipe.step(x, target=batch["target"]) + 0.0)
            losses.append(sum(parameter.grad.norm() for parameter in pipe.parameters()))
            del x
        found = torch.stack(losses)
        if is_cuda:
            torch.cuda.synchronize()
        return found

    expected = train()
    with torch.cuda.stream(torch.cuda.Stream()) if is_cuda else contextlib.nullcontext():
        found = train()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


FRESH = """
import torch, pipec
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
pipe = pipec.compile(model, ["{device}"] * 2, microbatches=1, loss_fn=nn.functional.mse_loss)
print("loss", float(pipe.step(torch.ones(4, 8), target=torch.zeros(4, 4))))
where = {{str(parameter.device) for parameter in pipe.parameters()}}
assert where == {{"{where}"}}, where
"""


@pytest.mark.slow
@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_the_first_step_of_a_process(device: torch.device, loading: str) -> None:
    """Kernels are loaded while ranks wait for each other. A device without an index is the first GPU."""
    where = {"cuda": "cuda:0", "cpu": "cpu"}[device.type]
    done = subprocess.run(
        [sys.executable, "-c", FRESH.format(device=device.type, where=where)],
        env={**os.environ, "CUDA_MODULE_LOADING": loading, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    expected = F.mse_loss(model(torch.ones(4, 8)), torch.zeros(4, 4))
    assert float(done.stdout.split()[-1]) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_a_batch_may_be_overwritten_once_a_step_has_returned(device: torch.device) -> None:
    """Also one in pinned memory, from which a busy GPU copies when the script has gone on."""
    model, batch = wide(2, 512).to(device), vectors(64, 512)
    pipe = pipec.compile(model, [device] * 2, microbatches=4, loss_fn=F.mse_loss)
    expected = float(pipe.step(**batch))
    busy = torch.eye(4096 if device.type == "cuda" else 64, device=device)
    if device.type == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    for _ in range(50):
        busy = busy @ busy
    loss = pipe.step(**batch)
    for tensor in batch.values():
        tensor.zero_()
    assert float(loss) == expected
