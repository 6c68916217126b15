"""Who holds a tensor's memory. It decides whether a buffer is free, and if a gradient must be copied."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pipec.ir import Instruction, Payload, Sizes, Value
from pipec.ir.text import evaluate_dim
from pipec.runtime.connections import Connections, Started

# The one private torch name of the runtime's memory handling: how many tensors share a storage.
_storage_use_count = torch._C._storage_Use_Count

_ALONE = 2
"""The count of a storage that one tensor holds: the tensor is one, the handle made to ask is the other."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, which may lie in tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for each in value.values() for tensor in tensors_in(each))
    elif isinstance(value, list | tuple):
        yield from (tensor for each in value for tensor in tensors_in(each))


def is_exclusive(tensor: Tensor) -> bool:
    """Whether no other tensor shares the memory of ``tensor``: no view, no alias, no transfer under way."""
    return _storage_use_count(tensor.untyped_storage()._cdata) == _ALONE


def fills_storage(tensor: Tensor) -> bool:
    """Whether the tensor takes up all of its storage. Keeping it alive then wastes no memory."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def compact(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it would keep more memory alive than it needs.

    That may also be an operator's: on CPUs ``mse_loss`` makes its scalar in the memory of all differences.
    """
    is_small = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    return tensor if is_small else tensor.clone()


class Buffer:
    """Memory for one received value. It is used again as soon as nobody holds the value it had before.

    Unless it ``stays``, it is nobody's but the value's, as for results. ``arriving`` is the message that
    fills it. Once that was waited for, on the device, it is ``settling``.
    """

    def __init__(self, value: Value, device: torch.device, stays: bool) -> None:
        self._value, self._device, self._stays = value, device, stays
        self.memory = torch.empty(0)
        self.arriving: Started | None = None
        self.settling: Started | None = None

    def settle(self, connections: Connections) -> None:
        """Let nothing but this hold the memory, as far as messages do."""
        if self.settling is not None:
            connections.settle(self.settling)
            self.settling = None

    def view(self, sizes: Sizes) -> Tensor:
        """A tensor of the value's shape where its names stand for ``sizes``, with undefined contents."""
        shape = [evaluate_dim(dim, sizes) for dim in self._value.shape]
        count, memory = math.prod(shape), self.memory
        if memory.numel() < count or not is_exclusive(memory):
            memory = torch.empty(count, dtype=getattr(torch, self._value.dtype), device=self._device)
        if self._stays:
            self.memory = memory
        return memory[:count].view(shape)


def buffers_for(instruction: Instruction, device: torch.device) -> list[Buffer]:
    """A buffer for each value that an instruction receives."""
    assert instruction.link is not None
    stays = instruction.slot >= 0 or instruction.link.payload is Payload.WEIGHT
    return [Buffer(value, device, stays) for value in instruction.link.values]
