"""Who holds a tensor's memory: what lets a buffer be reused and a gradient be kept without a copy."""

import torch
from torch import Tensor

# The one private torch name of the runtime's memory handling: how many tensors share a storage.
_storage_use_count = torch._C._storage_Use_Count

_ALONE = 2
"""The count for a storage held by one tensor: the tensor and the handle made to ask."""


def is_exclusive(tensor: Tensor) -> bool:
    """Whether no other tensor shares the memory of ``tensor``: no view, no alias, no transfer under way."""
    return _storage_use_count(tensor.untyped_storage()._cdata) == _ALONE


def fills_storage(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds nothing else, so that keeping one does not keep more alive."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
