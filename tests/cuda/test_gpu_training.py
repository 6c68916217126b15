"""Trainings on GPUs that ranks share, against eager torch or the same step without an option."""

import contextlib
import copy
import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import (
    VOCABULARY,
    LastLayer,
    assert_steps_agree,
    decoder,
    eager_step,
    errors,
    on,
    token_loss,
    tokens,
    vectors,
    wide,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pipec
from pipec.schedules import SEARCHED_SCHEDULES
from pipec.schedules.named import SCHEDULES
from tests.pipeline.test_precision import batches as mixed_batches
from tests.pipeline.test_precision import difference, pair

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-3)  # which divides no rounding by itself
FUSED = functools.partial(ADAMW, fused=True)


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [[nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()] for _ in range(3)]
    first, last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 64, 5)
    return nn.Sequential(first, *itertools.chain(*layers), nn.Flatten(), last)


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 3, 8, 8, generator=generator), torch.arange(16) % 5


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    torch.manual_seed(0)
    layers = (kind(128, 64, batch_first=True, bidirectional=True, bias=biased) for biased in (True, False))
    return nn.Sequential(*map(LastLayer, layers))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, *SEARCHED_SCHEDULES])
def test_every_schedule_computes_what_eager_does(device: torch.device, schedule: str) -> None:
    options = {"schedule": schedule, "microbatches": 8}
    assert_steps_agree(decoder().to(device), [device] * 4, token_loss, [tokens(16)], error=1e-5, **options)


@pytest.mark.slow
def test_bfloat16(device: torch.device) -> None:
    tolerances = {"rtol": 2e-2, "error": 2e-2}
    model = decoder().to(device, torch.bfloat16)
    assert_steps_agree(model, [device] * 4, token_loss, [tokens(16)], microbatches=8, **tolerances)


@pytest.mark.slow
def test_convolutions_and_batch_norm_in_mixed_precision(device: torch.device) -> None:
    """Convolutions run in bfloat16, and statistics are kept in float32."""
    expected, (x, y) = convolutions().to(device), on(device, images())
    model = copy.deepcopy(expected)
    pipe = pipec.compile(model, [device] * 2, microbatches=4, loss_fn=F.cross_entropy, precision="bf16-mixed")
    loss = pipe.step(x, target=y)
    with torch.autocast(device.type, torch.bfloat16):
        reference = eager_step(expected, F.cross_entropy, (x, y), 4)
    torch.testing.assert_close(loss.float(), reference.float(), rtol=2e-2, atol=0)
    assert max(errors(model, expected).values()) < 5e-2


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_batch_norm(device: torch.device, recompute: str) -> None:
    """A replay updates no statistics a second time."""
    torch.manual_seed(0)
    layers = [[nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()] for _ in range(4)]
    model = nn.Sequential(*itertools.chain(*layers), nn.Flatten(), nn.Linear(4 * 64, 3)).to(device)
    batches = [(torch.randn(16, 4, 8, 8), torch.randn(16, 3))]
    assert_steps_agree(model, [device] * 2, F.mse_loss, batches, recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_those_of_eager_torch(
    device: torch.device, caplog: pytest.LogCaptureFixture, kind: type[nn.RNNBase]
) -> None:
    """Dynamo traces them, and cuts fall between layers."""
    expected, (x, y) = recurrent(kind).to(device), on(device, vectors(16, 12, 128))
    pipe = assert_steps_agree(expected, [device] * 2, F.mse_loss, [(x, y)], rtol=1e-4, error=1e-3)
    assert all("primitives.RECURRENT_LAYER(" in pipe.source(rank) for rank in range(2))
    assert "Dynamo cannot trace" not in caplog.text
    with torch.no_grad():
        torch.testing.assert_close(pipe(x), expected(x), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="inductor needs a C compiler")
def test_compiled_kernels(device: torch.device, recwarn: pytest.WarningsRecorder) -> None:
    """Of every phase; dropout and attention draw what the source draws, from its seed."""
    losses = []
    for kernels in ("source", "inductor"):
        model, batch = decoder(dropout=0.1).to(device), on(device, tokens(8))
        pipe = pipec.compile(model, [device] * 2, microbatches=2, loss_fn=token_loss, kernels=kernels)
        torch.manual_seed(3)
        losses.append([float(pipe.step(batch[0], target=batch[1])) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert not [each for each in recwarn if "cannot compile" in str(each.message)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offloaded_values_of_random_operators(device: torch.device, dtype: torch.dtype) -> None:
    """Attention that draws leaves the state of its generator on the host, where the backward reads it."""
    model, batch = decoder(dropout=0.2).to(device, dtype), on(device, tokens(64))
    options: dict[str, Any] = {"schedule": "gpipe", "microbatches": 8, "loss_fn": token_loss}
    free = pipec.compile(copy.deepcopy(model), [device], **options)
    torch.manual_seed(3)
    expected = [float(free.step(batch[0], target=batch[1])) for _ in range(2)]
    limit = int(0.7 * free.memory().peak_bytes)
    pipe = pipec.compile(
        model, [device], memory_limit=limit, offload="activations", recompute="none", **options
    )
    torch.manual_seed(3)
    assert [float(pipe.step(batch[0], target=batch[1])) for _ in range(2)] == expected
    assert pipe.plan.offloading_stages
    gradients = {name: x.grad for name, x in free.named_parameters()}
    torch.testing.assert_close(
        {name: x.grad for name, x in pipe.named_parameters()}, gradients, rtol=0, atol=0
    )


@pytest.mark.slow
def test_a_llama_with_a_padding_mask(device: torch.device) -> None:
    """Rows of different lengths, in bfloat16, from transformers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=64
    )
    expected = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).train()
    model = copy.deepcopy(expected)
    ids, _ = on(device, tokens(8))
    mask = (torch.arange(ids.shape[1], device=device) < torch.arange(9, 17, device=device)[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    call = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    pipe = pipec.compile(model, [device] * 4, microbatches=4)
    loss = pipe.step(**call)
    reference = expected(**call).loss
    reference.backward()
    torch.testing.assert_close(loss.float(), reference.float(), rtol=2e-2, atol=0)
    assert max(errors(model, expected).values()) < 5e-2


def trained(pipe: pipec.Pipeline, batch: list[Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    losses = [float(pipe.step(batch[0], target=batch[1])) for _ in range(3)]
    return losses, {name: x.cpu() for name, x in pipe.full_state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [ADAMW, FUSED], ids=["foreach", "fused"])
def test_optimizers_and_clipping(device: torch.device, optimizer: Callable[..., Any]) -> None:
    """As eager torch with the same optimizer, which clips by the norm of the whole model."""
    expected, batch = decoder().to(device), on(device, tokens(8))
    model = copy.deepcopy(expected)
    pipe = pipec.compile(
        model, [device] * 4, microbatches=4, loss_fn=token_loss, optimizer=optimizer, clip_grad_norm=0.5
    )
    losses, found = trained(pipe, batch)
    plain, references = optimizer(expected.parameters()), []
    for _ in range(3):
        references.append(float(eager_step(expected, token_loss, (batch[0], batch[1]), 4)))
        nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
    assert losses == pytest.approx(references, rel=1e-5)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_sharded_state_of_replicas(device: torch.device, shard: str) -> None:
    """Two replicas of two stages, all on one GPU, against the same without shards."""
    found = []
    for each in (None, shard):
        pipe = pipec.compile(
            decoder().to(device),
            [device] * 4,
            microbatches=4,
            replicas=2,
            loss_fn=token_loss,
            optimizer=ADAMW,
            shard=each,
        )
        found.append(trained(pipe, on(device, tokens(8))))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_batches_of_many_lengths(device: torch.device) -> None:
    """Each is padded to its longest row, and none is compiled on its own."""
    lengths = (16, 11, 13, 16, 7, 12)
    batches = [tuple(x[:, :length].contiguous() for x in on(device, tokens(8))) for length in lengths]
    assert_steps_agree(decoder().to(device), [device] * 2, token_loss, batches)


@pytest.mark.slow
def test_a_stream_without_a_flush(device: torch.device) -> None:
    """The losses of a CPU, whose numbers hardly differ."""
    found = []
    for each in (torch.device("cpu"), device):
        pipe = pipec.compile(
            decoder().to(each), [each] * 4, loss_fn=token_loss, schedule="pipedream-2bw", optimizer=ADAMW
        )
        batches = [tokens(8)] * 6
        found.append([float(loss) for loss in pipe.stream([(x.to(each), y.to(each)) for x, y in batches])])
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert len({*found[1]}) >= 5


def contrastive(logits: Tensor, target: Tensor) -> Tensor:
    """InfoNCE of the rows' means, of which each is compared with all others."""
    u = F.normalize(logits.float().mean(1), dim=-1)
    v = F.normalize(F.one_hot(target, VOCABULARY).float().mean(1), dim=-1)
    return F.cross_entropy(5 * u @ v.T, torch.arange(len(u), device=u.device))


@pytest.mark.slow
def test_a_loss_of_the_whole_batch(device: torch.device) -> None:
    batches, options = [on(device, tokens(12))] * 2, {"num_eager": 1, "schedule": "1f1b"}
    assert_steps_agree(decoder().to(device), [device] * 2, contrastive, batches, **options)


@pytest.mark.slow
def test_a_checkpoint_that_is_written_while_training_goes_on(device: torch.device, tmp_path: Path) -> None:
    """What is saved is the state at the call, and not that of the steps behind it."""

    def pipeline() -> pipec.Pipeline:
        made = pipec.compile(
            decoder().to(device), [device] * 2, microbatches=2, loss_fn=token_loss, optimizer=ADAMW
        )
        assert isinstance(made, pipec.Pipeline)
        return made

    pipe, batch = pipeline(), on(device, tokens(8))
    pipe.step(batch[0], target=batch[1])
    saving = pipe.save_checkpoint(tmp_path / "checkpoint", asynchronous=True)
    expected = [float(pipe.step(batch[0], target=batch[1])) for _ in range(3)]
    saving.result()
    other = pipeline()
    other.load_checkpoint(tmp_path / "checkpoint")
    assert [float(other.step(batch[0], target=batch[1])) for _ in range(3)] == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.slow
def test_a_plan_within_60_percent_of_the_gpu_keeps_to_it(gpu: torch.device) -> None:
    """With what the allocator reserves; without recompute the step needs more than all of the GPU."""
    limit = int(0.6 * torch.cuda.mem_get_info(gpu)[0])
    model = wide(8, 4096).to(gpu)
    rows = limit // (8 * 5 * 4096 * 4)  # what they save takes 1.8 times the limit
    x = torch.randn(rows, 4096, device=gpu)
    pipe = pipec.compile(
        model, [gpu], microbatches=4, schedule="gpipe", loss_fn=F.mse_loss, memory_limit=limit
    )
    torch.cuda.reset_peak_memory_stats(gpu)
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(x, target=x)
    memory = pipe.plan.stages[0].cost.memory
    assert memory.saved < memory.unsaved, "a part is computed again"
    assert torch.cuda.max_memory_allocated(gpu) <= 1.05 * limit
    assert torch.cuda.max_memory_reserved(gpu) <= 1.25 * limit


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
