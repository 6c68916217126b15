"""What a step takes of a GPU: memory, as predicted, time, and no waits of the host."""

import copy
import functools
import resource
import statistics
from collections.abc import Callable
from operator import truediv
from typing import Any

import pytest
import torch
from gpu_models import free_unused_memory, on, token_loss, tokens, transformer, vectors, wide
from memory_meter import measure_memory
from torch import Tensor, nn
from torch.nn import functional as F

import pipec
from pipec.hardware.topology import Device, Level
from pipec.runtime.absent_tensors import is_absent, materialized, release_elsewhere
from zoo.layers import first_output

GB = 1e9
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
WEIGHTS = {"schedule": "looped-bfs-v8", "microbatches": 2}


@pytest.mark.parametrize(
    ("rows", "plain", "saving", "share", "rtol"),
    [
        (1024, {}, {"recompute": "none"}, 1, 0),
        (1024, {}, {"recompute": "full"}, 1, 0),
        (2048, {"schedule": "gpipe"}, {"offload": "activations", "recompute": "none"}, 0.8, 0),
        (512, WEIGHTS, {"offload": "weights"}, 0.5, 1e-4),
        (512, {**WEIGHTS, "clip_grad_norm": 1.0}, {"offload": "weights"}, 0.5, 1e-4),
    ],
    ids=["saved", "recomputed", "activations offloaded", "weights offloaded", "weights offloaded, clipped"],
)
def test_a_gpu_allocates_what_is_predicted(
    device: torch.device,
    rows: int,
    plain: dict[str, Any],
    saving: dict[str, Any],
    share: float,
    rtol: float,
) -> None:
    """Also if the host is ahead of copies: a share of the memory that is else needed, and the same losses.

    The allocator rounds up to 512 bytes, which is little of tensors of this size.
    """
    model, batch = wide(8, 512), vectors(rows, 512)
    options = {"loss_fn": F.mse_loss, "microbatches": 8, "optimizer": SGD, **plain}
    free = pipec.compile(copy.deepcopy(model), [device], **options)
    losses = [free.step(**batch) for _ in range(5)]
    most = share * free.memory().peak_bytes
    limit = {"memory_limit": int(most)} if saving.get("offload") == "activations" else {}
    pipe = pipec.compile(model, [device], **options, **saving, **limit)
    torch.testing.assert_close([pipe.step(**batch) for _ in range(5)], losses, rtol=rtol, atol=0)
    (measured,), (predicted,) = measure_memory(pipe, **batch), pipe.memory()
    assert predicted.host_bytes == pytest.approx(measured.host_bytes, rel=0.01)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)
    assert measured.peak_bytes <= 1.03 * most


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_microbatches(gpu: torch.device) -> None:
    before = torch.cuda.memory_allocated()
    model, peaks = wide(4, 1024).to(gpu), []
    for count in (8, 64):  # with 4 nothing is in flight any more when the first gradients are there
        batch = on(gpu, vectors(256 * count, 1024))
        pipe = pipec.compile(model, [gpu] * 4, microbatches=count, loss_fn=F.mse_loss)
        for _ in range(2):
            free_unused_memory()  # cuBLAS keeps 32 MiB for each thread that has ever multiplied
            torch.cuda.reset_peak_memory_stats()
            pipe.zero_grad()
            pipe.step(**batch)
            torch.cuda.synchronize()
        inputs = sum(tensor.nbytes for tensor in batch.values())
        peaks.append(torch.cuda.max_memory_allocated() - inputs - before)
        del pipe, batch
    assert peaks[1] < 1.05 * peaks[0]


@pytest.mark.slow
def test_a_plan_within_60_percent_of_the_gpu_keeps_to_it(gpu: torch.device) -> None:
    """With what the allocator reserves; without recompute the step needs more than all of the GPU."""
    limit = int(0.6 * torch.cuda.mem_get_info(gpu)[0])
    rows = limit // (8 * 5 * 4096 * 4)  # what they save takes 1.8 times the limit
    model, x = wide(8, 4096).to(gpu), torch.randn(rows, 4096, device=gpu)
    options = {"microbatches": 4, "schedule": "gpipe", "loss_fn": F.mse_loss, "memory_limit": limit}
    pipe = pipec.compile(model, [gpu], **options)
    torch.cuda.reset_peak_memory_stats(gpu)
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(x, target=x)
    memory = pipe.plan.stages[0].cost.memory
    assert memory.saved < memory.unsaved, "a part is computed again"
    assert torch.cuda.max_memory_allocated(gpu) <= 1.05 * limit
    assert torch.cuda.max_memory_reserved(gpu) <= 1.25 * limit


def seconds_of(step: Callable[[], object]) -> float:
    """How long a step takes, by the GPU's own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


@pytest.mark.slow
def test_a_profile_adds_up_to_a_step(gpu: torch.device) -> None:
    """Operators that are timed one by one find other clocks and caches than in a step."""
    model, count, batch = wide(4), 4, vectors(1024, 2048)
    example = pipec.Example(model, (batch["input"][:256],), {}, batch["target"][:256], F.mse_loss)
    profile = pipec.profile(example, microbatch_size=256, device=gpu)
    found = count * sum(op.seconds(phase) for op in profile.operators for phase in ("forward", "backward"))
    pipe = pipec.compile(model, [gpu], microbatches=count, loss_fn=F.mse_loss, recompute="none")
    batch = on(gpu, batch)
    times = [seconds_of(lambda: pipe.step(**batch)) for _ in range(8)]
    assert found == pytest.approx(statistics.median(times[3:]), rel=0.25)


@pytest.mark.slow
def test_a_recorded_step_lasts_as_long_as_it_takes_the_gpu(gpu: torch.device) -> None:
    """Both are times of the same steps: other processes may delay some of them."""
    model, batch = wide(4).to(gpu), on(gpu, vectors(4096, 2048))
    pipe = pipec.compile(model, [gpu] * 2, microbatches=4, loss_fn=F.mse_loss)
    for _ in range(3):
        pipe.step(**batch)
    with pipe.trace() as trace:
        seconds = [seconds_of(lambda: pipe.step(**batch)) for _ in range(5)]
    recorded = [step.makespan for step in trace.steps]
    assert statistics.median(map(truediv, recorded, seconds)) == pytest.approx(1, abs=0.25)


@pytest.mark.slow
def test_a_recurrent_network_takes_two_forwards_and_a_backward(gpu: torch.device) -> None:
    """The backward computes the layer again. cuDNN runs the steps; Python would take ten times as long."""
    model = first_output(nn.LSTM(512, 512, 4, batch_first=True)).to(gpu)
    batch = on(gpu, vectors(32, 256, 512))
    pipe = pipec.compile(copy.deepcopy(model), [gpu] * 2, microbatches=1, loss_fn=F.mse_loss)

    def step() -> None:
        F.mse_loss(model(batch["input"]), batch["target"]).backward()

    eager, own = ([seconds_of(call) for _ in range(10)] for call in (step, lambda: pipe.step(**batch)))
    assert min(own) < 2 * min(eager)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["gpu", "cpu", "pinned memory"])
def test_the_host_waits_nowhere_in_a_warm_step(gpu: torch.device, where: str) -> None:
    """Neither for the batch nor for the labels that count in it."""
    moves = {"gpu": Tensor.cuda, "cpu": Tensor.cpu, "pinned memory": Tensor.pin_memory}
    model, batch = transformer(dropout=0.1).to(gpu), {k: moves[where](x) for k, x in tokens(16).items()}
    pipe = pipec.compile(model, [gpu] * 4, microbatches=4, loss_fn=token_loss)
    for _ in range(2):
        pipe.step(**batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = pipe.step(**batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(loss) > 0


@pytest.mark.slow
def test_a_model_larger_than_a_gpu_is_compiled_on_the_host(device: torch.device) -> None:
    """45 GB of parameters, which nothing touches."""
    layers = [nn.utils.skip_init(nn.Linear, 16384, 16384, bias=False) for _ in range(42)]
    model = nn.Sequential(*layers)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 45 * GB
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = _resident()
    large = pipec.Topology((Device(1e12),) * 4, (Level(4, 1e11),))
    pipe = pipec.compile(model, [device] * 4, loss_fn=F.mse_loss, microbatches=2, topology=large)
    x = torch.ones(4, 16384)
    pipe.prepare(x, target=x)
    assert _resident() - before < 1 * GB
    if device.type == "cuda":
        assert torch.cuda.max_memory_allocated() < 1 * GB


def _resident() -> float:
    """The most memory that this process has had, in bytes."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_what_other_ranks_hold_takes_no_memory_of_a_gpu_to_be_captured(gpu: torch.device) -> None:
    weight = nn.Parameter(torch.ones(1024, 1024, device=gpu))
    release_elsewhere("weight", weight, "on rank 1")
    before = torch.cuda.memory_allocated()
    with materialized([weight]):
        assert weight.shape == (1024, 1024)
        assert torch.cuda.memory_allocated() == before
    assert is_absent(weight)
    assert (weight.shape, weight.device) == ((1024, 1024), gpu)
