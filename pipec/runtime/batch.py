"""How a mini-batch is split into microbatches."""

from typing import TypeVar

import torch
from torch import Tensor

from pipec.errors import InputError

T = TypeVar("T")

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def dense(leaf: T) -> T | Tensor:
    """A tensor laid out without gaps, as generated code expects it; anything else as it is.

    A slice such as ``tokens[:, :-1]`` is copied. Channels-last tensors stay what they are.
    """
    if not isinstance(leaf, Tensor) or leaf.is_contiguous():
        return leaf
    if leaf.ndim in _FORMATS and leaf.is_contiguous(memory_format=_FORMATS[leaf.ndim]):
        return leaf
    return leaf.contiguous()


def split_sizes(batch: int, num_microbatches: int) -> list[int]:
    """Rows of each microbatch, as equal as can be, larger ones first.

    Raises InputError when there are fewer rows than microbatches.
    """
    if batch < num_microbatches:
        raise InputError(
            f"a batch of {batch} rows cannot be split into {num_microbatches} microbatches; "
            f"pass at least {num_microbatches} rows, or compile with microbatches={max(batch, 1)} or fewer"
        )
    return [batch // num_microbatches + (i < batch % num_microbatches) for i in range(num_microbatches)]
