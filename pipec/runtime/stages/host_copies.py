"""Offloads saved values: copies them from the list that a microbatch's backward reads to the host, and back.

On a CPU, copies are synchronous. On a GPU they run on a separate stream, from or to pinned memory. torch
rounds each block of pinned memory up to a power of two, and keeps it for blocks of that size. So the values
of a microbatch are laid end to end over blocks of such sizes, of which less than ``_LEAST_BLOCK`` is wasted::

    5.3 MiB of values    ->    blocks of 4 MiB, 2 MiB
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from pipec.runtime.messages.cuda import CopyStream, Wait


@dataclass(eq=False)
class OffloadedValue:
    """Placeholder of a saved value that is on the host, or being copied there. No operator takes one.

    ``on_device`` is the value until its memory is released, on ``device``, which is the host itself for the
    state from which attention drew. ``host`` is the copy of its memory in pieces, complete after
    ``wait_copy``.
    """

    host: Sequence[Tensor]
    on_device: Tensor | None
    device: torch.device
    wait_copy: Wait
    layout: tuple[int, torch.Size, tuple[int, ...]]
    dtype: torch.dtype


class HostCopies:
    """Copies a stage's saved values at ``positions`` to the host, and back."""

    def __init__(self, device: torch.device, positions: Sequence[int]) -> None:
        self._positions = positions
        is_async = device.type == "cuda" and len(positions) > 0
        self._out, self._back = (CopyStream(device) if is_async else None for _ in range(2))
        self._arriving: dict[int, Wait] = {}

    def offload(self, saved: list[Any]) -> None:
        """Start to copy values to the host. They may not be read until they are copied back."""
        values = [saved[position] for position in self._positions]
        memory = list(map(_bytes_of, values))
        hosts = host_memory([each.numel() for each in memory], pinned=self._out is not None)
        wait = _start(self._out, lambda: _copy_all(map(_split, memory, hosts), hosts, to_host=True))
        for position, value, host in zip(self._positions, values, hosts, strict=True):
            layout = value.storage_offset(), value.size(), value.stride()
            saved[position] = OffloadedValue(host, value, value.device, wait, layout, value.dtype)

    def release_device_memory(self, saved: Sequence[Any]) -> None:
        """Wait for the copies to the host, and free the device memory of the values."""
        for position in self._positions if saved else ():
            saved[position].wait_copy()
            saved[position].on_device = None

    def prefetch(self, saved: list[Any], microbatch: int) -> None:
        """Start to copy values back to where they were."""
        offloaded: list[OffloadedValue] = [saved[position] for position in self._positions]
        memory = [
            torch.empty(sum(map(len, each.host)), dtype=torch.uint8, device=each.device) for each in offloaded
        ]
        hosts = [each.host for each in offloaded]
        self._arriving[microbatch] = _start(
            self._back, lambda: _copy_all(map(_split, memory, hosts), hosts, to_host=False)
        )
        for position, each, own in zip(self._positions, offloaded, memory, strict=True):
            value = torch.empty(0, dtype=each.dtype, device=each.device)
            saved[position] = value.set_(own.untyped_storage(), *each.layout)

    def wait_prefetch(self, microbatch: int) -> None:
        """Make the compute stream wait for the copies of a microbatch back to the device."""
        self._arriving.pop(microbatch)()

    def finish(self) -> None:
        """Make the compute stream wait for all copies."""
        self._arriving.clear()
        for stream in (self._out, self._back):
            if stream is not None:
                stream.finish()


_LEAST_BLOCK = 2**20


def host_memory(sizes: Sequence[int], pinned: bool) -> list[list[Tensor]]:
    """Host memory of these numbers of bytes, each in pieces of the blocks that hold all of them."""
    blocks = iter(_blocks(sum(sizes), pinned))
    room = next(blocks, torch.empty(0, dtype=torch.uint8))
    hosts = list[list[Tensor]]()
    for size in sizes:
        hosts.append([])
        while size:
            if not len(room):
                room = next(blocks)
            piece, room = room[:size], room[size:]
            hosts[-1].append(piece)
            size -= len(piece)
    return hosts


def _blocks(num_bytes: int, pinned: bool) -> list[Tensor]:
    """Blocks of sizes that are powers of two, the largest first, with room for ``num_bytes``."""
    count = -(-num_bytes // _LEAST_BLOCK)
    powers = [1 << bit for bit in reversed(range(count.bit_length())) if count >> bit & 1]
    return [torch.empty(each * _LEAST_BLOCK, dtype=torch.uint8, pin_memory=pinned) for each in powers]


def _start(stream: CopyStream | None, copy: Wait) -> Wait:
    if stream is not None:
        return stream.start(copy)
    copy()
    return _nothing


def _nothing() -> None:
    """A synchronous copy needs no waiting."""


def _copy_all(devices: Iterable[Sequence[Tensor]], hosts: Iterable[Sequence[Tensor]], to_host: bool) -> None:
    """Copy pieces of values to pieces of host memory, or back."""
    for pair in zip(chain.from_iterable(devices), chain.from_iterable(hosts), strict=True):
        source, target = pair if to_host else reversed(pair)
        target.copy_(source, non_blocking=True)


def _split(memory: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """The bytes of a value in pieces of the sizes of these."""
    found: tuple[Tensor, ...] = memory.split([len(each) for each in pieces])
    return found


def _bytes_of(value: Tensor) -> Tensor:
    """The whole storage of a value, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
