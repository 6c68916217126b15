"""Memory of large values, which the next one of the same size takes within a step.

glibc gives blocks of ``MMAP_THRESHOLD_BYTES`` and more back to the system when they are freed, and the system
zeroes every page of the next one. Of a product that writes such a block, with 256 terms for each number, that
is a third of the time.
"""

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from pipec.runtime.memory.storage import is_exclusive

MAX_CACHED_BYTES = 1 << 30
"""Of one rank. Whatever is made beyond that goes when it is let go of."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.blocks: list[Tensor] = []


_kept = _Kept()
"""Blocks of each thread, and so of each rank of a process, as bytes."""


def empty_cached(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor, in memory that a former one of this thread has left, if there is such.

    Memory is free when no other tensor is in it: what was saved, sent or returned is not, under any name.
    """
    if torch.compiler.is_compiling() or device.type != "cpu":
        return torch.empty(sizes, dtype=dtype, device=device)
    num_bytes = math.prod(sizes) * dtype.itemsize
    for block in _kept.blocks:
        if block.numel() == num_bytes and is_exclusive(block):
            return block.view(dtype).view(sizes)
    made = torch.empty(num_bytes, dtype=torch.uint8)
    if sum(map(torch.numel, _kept.blocks)) + num_bytes <= MAX_CACHED_BYTES:
        _kept.blocks.append(made)
    return made.view(dtype).view(sizes)


def clear_block_cache() -> None:
    """Let go of what this thread keeps."""
    _kept.blocks.clear()
