"""A cache of the memory of large values, reused by values of the same size within a step.

glibc returns freed blocks of ``MMAP_THRESHOLD_BYTES`` and more to the system, which zeroes every page of the
next one. For a matrix product that writes such a block, with 256 terms per element, that takes a third of the
time.
"""

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from pipec.runtime.memory.storage import is_exclusive

MAX_CACHED_BYTES = 1 << 30
"""Per rank. Further blocks are not cached."""


class _Cache(threading.local):
    def __init__(self) -> None:
        self.blocks: list[Tensor] = []


_cache = _Cache()
"""The blocks of each thread, and so of each rank of a process, as bytes."""


def empty_cached(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor, in cached memory of this thread if possible.

    Memory is free when no other tensor uses it; saved, sent and returned values do.
    """
    if torch.compiler.is_compiling() or device.type != "cpu":
        return torch.empty(sizes, dtype=dtype, device=device)
    num_bytes = math.prod(sizes) * dtype.itemsize
    for block in _cache.blocks:
        if block.numel() == num_bytes and is_exclusive(block):
            return block.view(dtype).view(sizes)
    block = torch.empty(num_bytes, dtype=torch.uint8)
    if sum(map(torch.numel, _cache.blocks)) + num_bytes <= MAX_CACHED_BYTES:
        _cache.blocks.append(block)
    return block.view(dtype).view(sizes)


def clear_block_cache() -> None:
    """Free the cached blocks of this thread."""
    _cache.blocks.clear()
