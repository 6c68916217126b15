"""Saved values that wait in host memory: copied out of the list that a microbatch's backward reads, and back.

A device that is a CPU has its memory on the host as well; a copy is then made at once. On a GPU it is made on
a stream of its own, from or to pinned memory.
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
    """Stands for a saved value that is on the host, or on its way there. No operator takes one.

    ``there`` is the value until the device lets go of it, and ``host`` a copy of all its memory, which has
    been filled when ``left`` was waited for.
    """

    host: Tensor
    there: Tensor | None
    left: Wait
    layout: tuple[int, torch.Size, tuple[int, ...]]
    dtype: torch.dtype


class HostCopies:
    """Copies what a stage saves at ``positions`` to the host, and back."""

    def __init__(self, device: torch.device, positions: Sequence[int]) -> None:
        self._device, self._positions = device, positions
        is_apart = device.type == "cuda" and len(positions) > 0
        self._out, self._back = (CopyStream(device) if is_apart else None for _ in range(2))
        self._arriving: dict[int, Wait] = {}

    def offload(self, saved: list[Any]) -> None:
        """Start to copy. Nothing may read these values from now on."""
        made = [saved[position] for position in self._positions]
        with uncounted():
            hosts = [_empty_bytes(value, torch.device("cpu"), self._out is not None) for value in made]
            left = _start(self._out, lambda: _copy_all(hosts, list(map(_bytes_of, made))))
        for position, value, host in zip(self._positions, made, hosts, strict=True):
            layout = value.storage_offset(), value.size(), value.stride()
            saved[position] = OffloadedValue(host, value, left, layout, value.dtype)

    def release_device_memory(self, saved: Sequence[Any]) -> None:
        """Let the device use the memory of these values for what it computes next."""
        for position in self._positions if saved else ():
            saved[position].left()
            saved[position].there = None

    def prefetch(self, saved: list[Any], microbatch: int) -> None:
        """Start to copy back."""
        absent: list[OffloadedValue] = [saved[position] for position in self._positions]
        memory = [_empty_bytes(each.host, self._device) for each in absent]
        hosts = [each.host for each in absent]
        self._arriving[microbatch] = _start(self._back, lambda: _copy_all(memory, hosts))
        for position, each, found in zip(self._positions, absent, memory, strict=True):
            value = torch.empty(0, dtype=each.dtype, device=self._device)
            saved[position] = value.set_(found.untyped_storage(), *each.layout)

    def wait_prefetch(self, microbatch: int) -> None:
        """Let what is computed next find what was copied back."""
        self._arriving.pop(microbatch)()

    def finish(self) -> None:
        """Let whatever is done next on the device come after all copies."""
        self._arriving.clear()
        for stream in (self._out, self._back):
            if stream is not None:
                stream.finish()


def host_bytes(saved: Sequence[Any]) -> int:
    """The bytes of these values in host memory."""
    return sum(each.host.numel() for each in saved if isinstance(each, OffloadedValue))


def _start(stream: CopyStream | None, copy: Wait) -> Wait:
    if stream is not None:
        return stream.start(copy)
    copy()
    return _nothing


def _nothing() -> None:
    """A copy that was made at once is over."""


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _bytes_of(value: Tensor) -> Tensor:
    """All of the memory behind a value, whatever its strides."""
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


def _empty_bytes(value: Tensor, device: torch.device, pinned: bool = False) -> Tensor:
    size = value.untyped_storage().nbytes()
    return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
