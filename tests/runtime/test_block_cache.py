"""Large products are made in memory that former ones have left, if nobody else has it."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipec
from pipec.runtime.memory import block_cache
from pipec.runtime.memory.block_cache import clear_block_cache, empty_cached

CPU = torch.device("cpu")


def test_memory_is_free_when_nobody_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_block_cache()
    first = empty_cached([4, 8], torch.float32, CPU)
    place, view = first.data_ptr(), first.t()[1:]
    del first
    second = empty_cached([4, 8], torch.float32, CPU)
    assert second.data_ptr() != place, "a view of the first is there"
    del view
    third = empty_cached([2, 8], torch.float64, CPU)
    assert third.data_ptr() == place
    assert (third.shape, third.dtype) == ((2, 8), torch.float64)
    monkeypatch.setattr(block_cache, "MAX_CACHED_BYTES", 300)
    beyond = empty_cached([4, 8], torch.float32, CPU)
    place = beyond.data_ptr()
    assert len(block_cache._cache.blocks) == 2
    del second, beyond
    clear_block_cache()
    assert not block_cache._cache.blocks


def test_a_compiled_function_takes_memory_of_its_own() -> None:
    clear_block_cache()
    torch.compile(lambda: empty_cached([4], torch.float32, CPU).fill_(1), fullgraph=True, backend="eager")()
    assert not block_cache._cache.blocks


@pytest.mark.parametrize("options", [{}, {"schedule": "zb-h1", "recompute": "full"}], ids=str)
def test_steps_have_the_bits_of_eager(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With every product taken for large."""
    monkeypatch.setattr("pipec.passes.reuse_memory.MMAP_THRESHOLD_BYTES", 1)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.GELU())))
    eager, pipe = copy.deepcopy(model), pipec.compile(model, 2, loss_fn=F.mse_loss, microbatches=4, **options)
    for seed in range(2):
        x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(seed))
        for rows, target in zip(x.chunk(4), y.chunk(4), strict=True):
            (F.mse_loss(eager(rows), target) / 4).backward()
        pipe.step(x, target=y)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    assert "out=empty_cached([b, 8], torch.float32, device)" in pipe.source(0)
    assert not block_cache._cache.blocks


def test_results_stay_with_their_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipec.passes.reuse_memory.MMAP_THRESHOLD_BYTES", 1)
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    pipe = pipec.compile(model, 1, microbatches=2)
    x = torch.randn(2, 8, 8)
    first, second = pipe(x[0]), pipe(x[1])
    torch.testing.assert_close(first, model(x[0]))
    torch.testing.assert_close(second, model(x[1]))


def test_small_products_take_memory_as_ever() -> None:
    pipe = pipec.compile(nn.Linear(8, 8), 1, loss_fn=F.mse_loss)
    pipe.prepare(torch.ones(4, 8), target=torch.ones(4, 8))
    assert "empty_cached" not in pipe.source(0)
