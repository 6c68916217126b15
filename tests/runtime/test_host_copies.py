"""Copies to host memory and back."""

import torch

from pipec.runtime.stages.host_copies import HostCopies


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
