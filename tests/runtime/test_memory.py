"""Large products reuse memory that nobody has, and values are copied to host memory and back."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from memory_meter import measure_memory
from slow_params import slow
from torch import Tensor, nn

import pipec
from pipec.ir import Phase
from pipec.pipeline import Pipeline
from pipec.runtime.memory import block_cache
from pipec.runtime.memory.block_cache import clear_block_cache, empty_cached
from pipec.runtime.stages import host_copies
from pipec.runtime.stages.host_copies import HostCopies, OffloadedValue, host_memory

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


# copies to host memory and back


def test_values_go_back_to_where_they_were() -> None:
    """Attention on a GPU leaves the state of its generator on the host, where its gradient reads it."""
    copies = HostCopies(torch.device("meta"), [0, 1])
    seed, offset = torch.tensor(7), torch.arange(6).view(2, 3)[:, 1:]
    saved = [seed, offset]
    copies.offload(saved)
    copies.release_device_memory(saved)
    copies.prefetch(saved, 0)
    copies.wait_prefetch(0)
    for back, value in zip(saved, (seed, offset), strict=True):
        assert back.device == value.device
        assert back.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
        assert back.stride() == value.stride()
        torch.testing.assert_close(back, value)


@pytest.mark.parametrize("sizes", [[], [0], [5_300_000, 7, 0, 3 << 20], [1 << 20], [(1 << 20) + 1, 999]])
def test_little_pinned_memory_is_wasted(sizes: list[int]) -> None:
    """torch rounds each block up to a power of two: a value of 1.1 GB alone would take 2.1."""
    pieces = host_memory(sizes, pinned=False)
    assert [sum(map(len, own)) for own in pieces] == sizes
    blocks = {piece.untyped_storage().data_ptr(): piece for own in pieces for piece in own}
    taken = [piece.untyped_storage().nbytes() for piece in blocks.values()]
    assert all(size & (size - 1) == 0 for size in taken), "torch takes no more than these"
    assert sum(taken) - sum(sizes) < 1 << 20


def test_values_survive_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "_LEAST_BLOCK", 8)
    values = [torch.randn(5, 3).t(), torch.arange(7, dtype=torch.int16), torch.empty(0), torch.tensor(True)]
    saved = [*values, "a number"]
    copies = HostCopies(CPU, range(len(values)))
    copies.offload(saved)
    offloaded = [each for each in saved if isinstance(each, OffloadedValue)]
    assert sum(len(piece) for each in offloaded for piece in each.host) == 60 + 14 + 1
    assert [len(each.host) for each in saved[:4]] == [1, 2, 0, 1]
    copies.release_device_memory(saved)
    copies.prefetch(saved, 2)
    copies.wait_prefetch(2)
    for back, value in zip(saved, values, strict=False):
        torch.testing.assert_close(back, value, rtol=0, atol=0)
        assert back.stride() == value.stride()


# what ``pipe.memory()`` predicts is what ``measure_memory(pipe, ...)`` finds


ADAM = functools.partial(torch.optim.AdamW, lr=1e-3)


def model() -> nn.Module:
    """Saved masks, changing buffers, values read twice, views that are saved and gradients that add up."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.Dropout(0.1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.GELU(),
        nn.Linear(64, 10),
    )


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        slow(1, {"schedule": "gpipe"}),
        (2, {"schedule": "1f1b", "recompute": "full"}),
        slow(2, {"schedule": "zb-v"}),
    ],
    ids=str,
)
def test_each_rank_holds_what_is_predicted(devices: int, options: dict[str, Any]) -> None:
    """With the state of its optimizer, which the first step makes."""
    x, y, cross_entropy = torch.randn(16, 3, 12, 12), torch.arange(16) % 10, F.cross_entropy
    pipe = pipec.compile(model(), devices, loss_fn=cross_entropy, microbatches=8, optimizer=ADAM, **options)
    pipe.step(x, target=y)
    measured, predicted = measure_memory(pipe, x, target=y), pipe.memory()
    for found, said in zip(measured, predicted, strict=True):
        assert said.peak_bytes == pytest.approx(found.peak_bytes, rel=0.01), f"rank {found.rank}"
        assert said.most[0] == pytest.approx(found.most[0], rel=0.01), "no memory waits for messages"
        assert said.after[-1] == pytest.approx(found.after[-1], rel=0.01), "gradients go with the update"
        assert len(found.most) == len(said.most) == len(pipe.programs[found.rank].instructions)


def after_a_step(width: int, devices: int, **options: object) -> tuple[Pipeline, Tensor]:
    """A pipeline of linear layers, and a batch for it, if the gradients of a first step were set to None."""
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())))
    x, loss = torch.randn(512, width), nn.functional.mse_loss
    pipe = pipec.compile(net, devices, loss_fn=loss, microbatches=4, **options)  # type: ignore[arg-type]
    pipe.step(x, target=x)
    net.zero_grad()
    return pipe, x


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {"schedule": "1f1b"}),  # what is sent was saved, and outlives that; the loss has large memory
        slow(2, {"schedule": "gpipe"}),  # all of a stage is saved when its gradients begin
        slow(1, {"on_nan": "raise"}),  # the gradients that are held become those of the parameters
        (2, {"stages": 1, "replicas": 2}),  # and so do those that travel
    ],
    ids=str,
)
def test_a_step_without_an_update_holds_what_is_predicted(devices: int, options: dict[str, object]) -> None:
    pipe, x = after_a_step(64, devices, **options)
    for found, said in zip(measure_memory(pipe, x, target=x), pipe.memory(), strict=True):
        assert said.peak_bytes == pytest.approx(found.peak_bytes, rel=0.01)


def test_each_part_of_a_backward_holds_what_is_predicted() -> None:
    """Between the parts of the last backward gradients are summed, and what the first has read is gone."""
    pipe, x = after_a_step(256, 2, stages=1, replicas=2, optimizer=ADAM)
    assert pipe.plan.segments == {(0, Phase.BACKWARD): 2}
    found, said = measure_memory(pipe, x, target=x)[0], pipe.memory()[0]
    assert said.most == pytest.approx(found.most, rel=0.001)
    assert said.after == pytest.approx(found.after, rel=0.001)
