"""Copies to host memory and back."""

import pytest
import torch

from pipec.runtime.stages import host_copies
from pipec.runtime.stages.host_copies import HostCopies, OffloadedValue, host_memory


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
    copies = HostCopies(torch.device("cpu"), range(len(values)))
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
