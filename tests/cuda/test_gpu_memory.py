"""What is predicted of a GPU's memory is what torch's allocator says."""

import copy
import functools

import pytest
import torch
from memory_meter import measure_memory
from torch import nn

import pipec


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_gpu_allocates_what_is_predicted(device: torch.device, recompute: str) -> None:
    """The allocator rounds up to 512 bytes, which is little of tensors of this size."""
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4))
    x, adam = torch.randn(1024, 512), functools.partial(torch.optim.AdamW, lr=1e-3)
    options = {"loss_fn": nn.functional.mse_loss, "microbatches": 4, "optimizer": adam}
    pipe = pipec.compile(nn.Sequential(*layers), [device], recompute=recompute, **options)  # type: ignore[arg-type]
    pipe.step(x, target=x)
    (measured,), (predicted,) = measure_memory(pipe, x, target=x), pipe.memory()
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)


def test_a_gpu_lets_go_of_what_waits_on_the_host(device: torch.device) -> None:
    """The allocator has what was predicted, although the host is ahead of the copies; the bits stay."""
    layers = (nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4))
    model, x = nn.Sequential(*layers), torch.randn(4096, 512)
    adam = functools.partial(torch.optim.AdamW, lr=1e-3)
    options = {"loss_fn": nn.functional.mse_loss, "schedule": "gpipe", "microbatches": 8, "optimizer": adam}
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
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(8))
    model, x = nn.Sequential(*layers), torch.randn(512, 512)
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    options = {"loss_fn": nn.functional.mse_loss, "schedule": "looped-bfs-v8", "microbatches": 2}
    options |= {"optimizer": sgd, "clip_grad_norm": clip}
    free = pipec.compile(copy.deepcopy(model), [device], **options)  # type: ignore[arg-type]
    pipe = pipec.compile(model, [device], offload="weights", **options)  # type: ignore[arg-type]
    for _ in range(5):
        torch.testing.assert_close(pipe.step(x, target=x), free.step(x, target=x), rtol=1e-4, atol=0)
    assert {each.device.type for each in pipe.parameters()} == {"cpu"}
    (measured,), (predicted,) = measure_memory(pipe, x, target=x), pipe.memory()
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)
    assert measured.peak_bytes < 0.5 * free.memory().peak_bytes
