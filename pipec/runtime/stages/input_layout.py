"""The layout in which generated code expects the tensors of a mini-batch."""

from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def as_contiguous(leaf: T) -> T | Tensor:
    """A contiguous copy of a tensor with gaps, as generated code expects; other leaves unchanged.

    A slice such as ``tokens[:, :-1]`` is copied. Channels-last tensors stay channels-last.
    """
    if not isinstance(leaf, Tensor) or leaf.is_contiguous():
        return leaf
    if leaf.ndim in _FORMATS and leaf.is_contiguous(memory_format=_FORMATS[leaf.ndim]):
        return leaf
    return leaf.contiguous()
