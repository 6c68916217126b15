"""What a step takes of a GPU: memory, as predicted, time, and no waits of the host."""

import copy
import functools
import resource
import statistics
from collections.abc import Callable
from operator import truediv

import pytest
import torch
from gpu_models import LastLayer, decoder, free_unused_memory, on, token_loss, tokens, vectors, wide
from memory_meter import measure_memory
from torch import nn
from torch.nn import functional as F

import pipec
from pipec.compiler.compile_cache import CaptureSignature
from pipec.compiler.compiler import CompileRequest
from pipec.hardware.topology import Device, Level
from pipec.ir import Mode
from pipec.runtime.absent_tensors import is_absent, materialized, release_elsewhere
from pipec.runtime.executions import STEP
from pipec.runtime.stream.call_arguments import CallArguments

GB = 1e9
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_gpu_allocates_what_is_predicted(device: torch.device, recompute: str) -> None:
    """The allocator rounds up to 512 bytes, which is little of tensors of this size."""
    x, _ = vectors(1024, 512)
    options = {"loss_fn": F.mse_loss, "microbatches": 4, "optimizer": ADAMW}
    pipe = pipec.compile(wide(4, 512), [device], recompute=recompute, **options)  # type: ignore[arg-type]
    pipe.step(x, target=x)
    (measured,), (predicted,) = measure_memory(pipe, x, target=x), pipe.memory()
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)


def test_a_gpu_lets_go_of_what_waits_on_the_host(device: torch.device) -> None:
    """The allocator has what was predicted, although the host is ahead of the copies; the bits stay."""
    model, (x, _) = wide(4, 512), vectors(4096, 512)
    options = {"loss_fn": F.mse_loss, "schedule": "gpipe", "microbatches": 8, "optimizer": ADAMW}
    free = pipec.compile(copy.deepcopy(model), [device], **options)  # type: ignore[arg-type]
    losses = [free.step(x, target=x) for _ in range(3)]
    limit = int(0.8 * free.memory().peak_bytes)
    within = {"memory_limit": limit, "offload": "activations", "recompute": "none"}
    pipe = pipec.compile(model, [device], **options, **within)  # type: ignore[arg-type]
    assert [pipe.step(x, target=x) for _ in range(3)] == losses
    (measured,), (predicted,) = measure_memory(pipe, x, target=x), pipe.memory()
    assert predicted.host_bytes == pytest.approx(measured.host_bytes, rel=0.01)
    assert measured.peak_bytes <= limit * 1.03
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gpu_loads_weights_in_turn(device: torch.device, clip: float | None) -> None:
    """Copies run beside computes, and updates on the host; the allocator has what was predicted."""
    model, (x, _) = wide(8, 512), vectors(512, 512)
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    options = {"loss_fn": F.mse_loss, "schedule": "looped-bfs-v8", "microbatches": 2}
    options |= {"optimizer": sgd, "clip_grad_norm": clip}
    free = pipec.compile(copy.deepcopy(model), [device], **options)  # type: ignore[arg-type]
    pipe = pipec.compile(model, [device], offload="weights", **options)  # type: ignore[arg-type]
    for _ in range(5):
        torch.testing.assert_close(pipe.step(x, target=x), free.step(x, target=x), rtol=1e-4, atol=0)
    assert {each.device.type for each in pipe.parameters()} == {"cpu"}
    (measured,), (predicted,) = measure_memory(pipe, x, target=x), pipe.memory()
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)
    assert measured.peak_bytes < 0.5 * free.memory().peak_bytes


def peak_of(step: Callable[[], object]) -> tuple[float, float]:
    """The most memory that is allocated, and reserved, at a time in a warm step, in bytes.

    cuBLAS keeps 32 MiB for each thread that has ever multiplied; of them, those of this step are counted.
    """
    step()
    torch.cuda.synchronize()
    free_unused_memory()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated()), float(torch.cuda.max_memory_reserved())


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_microbatches(gpu: torch.device) -> None:
    before = torch.cuda.memory_allocated()
    model, peaks = wide(4, 1024).to(gpu), []
    for count in (8, 64):  # with 4 nothing is in flight any more when the first gradients are there
        x, y = on(gpu, vectors(256 * count, 1024))
        pipe = pipec.compile(model, [gpu] * 4, microbatches=count, loss_fn=F.mse_loss)

        def step(pipe: pipec.Pipeline = pipe, x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            pipe.zero_grad()
            pipe.step(x, target=y)

        inputs = x.nbytes + y.nbytes
        peaks.append(peak_of(step)[0] - inputs - before)
        del pipe, step, x, y
    assert peaks[1] < 1.05 * peaks[0]


@pytest.mark.slow
def test_the_plan_knows_the_peak(gpu: torch.device) -> None:
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    model, (x, y) = wide().to(gpu), on(gpu, vectors(8192))
    pipe = pipec.compile(model, [gpu], microbatches=4, loss_fn=F.mse_loss, recompute="none")

    def step() -> None:
        pipe.zero_grad()
        pipe.step(x, target=y)

    allocated, reserved = (peak - others for peak, others in zip(peak_of(step), before, strict=True))
    (planned,) = pipe.memory()
    assert planned.peak_bytes == pytest.approx(allocated, rel=0.05)
    assert planned.peak_bytes == pytest.approx(reserved, rel=0.20)


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
    model, count, (x, y) = wide(4), 4, vectors(1024)
    example = pipec.Example(model, (x[:256],), {}, y[:256], F.mse_loss)
    profile = pipec.profile(example, microbatch_size=256, device=gpu)
    found = count * sum(op.seconds(phase) for op in profile.operators for phase in ("forward", "backward"))
    pipe = pipec.compile(model, [gpu], microbatches=count, loss_fn=F.mse_loss, recompute="none")
    x, y = on(gpu, (x, y))
    times = [seconds_of(lambda: pipe.step(x, target=y)) for _ in range(8)]
    assert found == pytest.approx(statistics.median(times[3:]), rel=0.25)


@pytest.mark.slow
def test_a_recorded_step_lasts_as_long_as_it_takes_the_gpu(gpu: torch.device) -> None:
    """Both are times of the same steps: other processes may delay some of them."""
    model, (x, y) = wide(4).to(gpu), on(gpu, vectors(4096))
    pipe = pipec.compile(model, [gpu] * 2, microbatches=4, loss_fn=F.mse_loss)
    for _ in range(3):
        pipe.step(x, target=y)
    with pipe.trace() as trace:
        seconds = [seconds_of(lambda: pipe.step(x, target=y)) for _ in range(5)]
    recorded = [step.makespan for step in trace.steps]
    assert statistics.median(map(truediv, recorded, seconds)) == pytest.approx(1, abs=0.25)


@pytest.mark.slow
def test_a_recurrent_network_takes_two_forwards_and_a_backward(gpu: torch.device) -> None:
    """The backward computes the layer again. cuDNN runs the steps; Python would take ten times as long."""
    model = LastLayer(nn.LSTM(512, 512, 4, batch_first=True)).to(gpu)
    x, y = (torch.randn(32, 256, 512, device=gpu) for _ in range(2))
    pipe = pipec.compile(copy.deepcopy(model), [gpu] * 2, microbatches=1, loss_fn=F.mse_loss)

    def step() -> None:
        F.mse_loss(model(x), y).backward()

    eager, own = ([seconds_of(call) for _ in range(10)] for call in (step, lambda: pipe.step(x, target=y)))
    assert min(own) < 2 * min(eager)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["gpu", "cpu", "pinned memory"])
def test_the_host_waits_nowhere_in_a_warm_step(gpu: torch.device, where: str) -> None:
    """Neither for the batch nor for the labels that count in it."""
    model, (x, y) = decoder(dropout=0.1).to(gpu), tokens(16)
    if where == "gpu":
        x, y = on(gpu, (x, y))
    elif where == "pinned memory":
        x, y = x.pin_memory(), y.pin_memory()
    pipe = pipec.compile(model, [gpu] * 4, microbatches=4, loss_fn=token_loss)
    for _ in range(2):
        pipe.step(x, target=y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = pipe.step(x, target=y)
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
    inputs = torch.ones(4, 16384)
    executions = pipe._executions
    call = executions.check_call(Mode.TRAIN, CallArguments((inputs,), {}, inputs))
    fingerprint = executions._fingerprint(Mode.TRAIN, executions.snapshot())
    key = executions._capture_key(STEP, call, fingerprint)
    executions.compiler.compile(CompileRequest(executions.compiler, CaptureSignature(key, 0), call))
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
