"""Who holds a tensor's memory. It decides whether a buffer is free, and whether a gradient must be copied."""

import torch
from torch import Tensor

# The one private torch name of the runtime's memory handling: how many tensors share a storage.
_storage_use_count = torch._C._storage_Use_Count

_ALONE = 2
"""The count of a storage that one tensor holds: the tensor is one, the handle made to ask is the other."""


def is_exclusive(tensor: Tensor) -> bool:
    """Whether no other tensor shares the memory of ``tensor``: no view, no alias, no transfer under way."""
    return _storage_use_count(tensor.untyped_storage()._cdata) == _ALONE


def fills_storage(tensor: Tensor) -> bool:
    """Whether the tensor takes up all of its storage. Keeping it alive then wastes no memory."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
