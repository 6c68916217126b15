"""The layout in which generated code expects the tensors of a mini-batch."""

from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def as_contiguous(leaf: T) -> T | Tensor:
    """A tensor laid out without gaps, as generated code expects it; anything else as it is.

    A slice such as ``tokens[:, :-1]`` is copied. Channels-last tensors stay what they are.
    """
    if not isinstance(leaf, Tensor) or leaf.is_contiguous():
        return leaf
    if leaf.ndim in _FORMATS and leaf.is_contiguous(memory_format=_FORMATS[leaf.ndim]):
        return leaf
    return leaf.contiguous()
