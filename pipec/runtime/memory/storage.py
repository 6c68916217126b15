"""How many tensors share a storage: this decides if a buffer is free, and if a gradient must be copied."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from pipec.torch_compat.run_time import storage_use_count


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, also inside tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for each in value.values() for tensor in tensors_in(each))
    elif isinstance(value, list | tuple):
        yield from (tensor for each in value for tensor in tensors_in(each))


def is_exclusive(tensor: Tensor) -> bool:
    """Whether nothing else uses the memory of ``tensor``: no view, no alias, no transfer in transit."""
    return num_aliases(tensor) == 1


def num_aliases(tensor: Tensor) -> int:
    """The number of tensors that share the memory of ``tensor``."""
    return storage_use_count(tensor.untyped_storage()) - 1


def fills_storage(tensor: Tensor) -> bool:
    """Whether the tensor takes up all of its storage. Keeping it alive then wastes no memory."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def compact(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it would keep more memory alive than it needs.

    This also concerns operators: on CPUs, the scalar of ``mse_loss`` is in the memory of all differences.
    """
    is_small = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    return tensor if is_small else tensor.clone()
