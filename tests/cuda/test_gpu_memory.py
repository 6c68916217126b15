"""What is predicted of a GPU's memory is what torch's allocator says."""

import functools

import pytest
import torch
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
    (measured,), (predicted,) = pipe.measure_memory(x, target=x), pipe.memory()
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.03)
