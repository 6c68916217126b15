"""Offloads saved values: copies them from the list that a microbatch's backward reads to the host, and back.

On a CPU, copies are synchronous. On a GPU they run on a separate stream, from or to pinned memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipec.runtime.memory.meter import uncounted
from pipec.runtime.messages.cuda import CopyStream

Wait = Callable[[], None]


@dataclass(eq=False)
class OffloadedValue:
    """Placeholder of a saved value that is on the host, or being copied there. No operator takes one.

    ``on_device`` is the value until its memory is released, on ``device``, which is the host itself for the
    state from which attention drew. ``host`` is the copy of its memory, complete after ``wait_copy``.
    """

    host: Tensor
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
        with uncounted():
            hosts = [_empty_bytes(value, torch.device("cpu"), self._out is not None) for value in values]
            wait = _start(self._out, lambda: _copy_all(hosts, list(map(_bytes_of, values))))
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
        memory = [_empty_bytes(each.host, each.device) for each in offloaded]
        hosts = [each.host for each in offloaded]
        self._arriving[microbatch] = _start(self._back, lambda: _copy_all(memory, hosts))
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


def host_bytes(saved: Sequence[Any]) -> int:
    """The bytes that these values take in host memory."""
    return sum(each.host.numel() for each in saved if isinstance(each, OffloadedValue))


def _start(stream: CopyStream | None, copy: Wait) -> Wait:
    if stream is not None:
        return stream.start(copy)
    copy()
    return _nothing


def _nothing() -> None:
    """A synchronous copy needs no waiting."""


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _bytes_of(value: Tensor) -> Tensor:
    """The whole storage of a value, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


def _empty_bytes(value: Tensor, device: torch.device, pinned: bool = False) -> Tensor:
    size = value.untyped_storage().nbytes()
    return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
