"""Weights in host memory: copied to the device for each use, and their gradients copied back.

On a CPU, copies are synchronous. On a GPU they run beside computes, from or to pinned memory: weights on one
stream, gradients on another.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pipec.runtime.messages.cuda import CopyStream, Wait, pinned_copy


class HostLink:
    """The streams of a device for copies to the host and back. None on a CPU, or if it ``is_idle``."""

    def __init__(self, device: torch.device, is_idle: bool = False) -> None:
        self.device, self.is_async = device, device.type == "cuda" and not is_idle
        self.to_host, self.to_device = (CopyStream(device) if self.is_async else None for _ in range(2))

    def load(self, copy: Wait) -> Wait:
        """Start a copy to the device; returns a function that makes later work wait for it."""
        return _started(self.to_device, copy)

    def store(self, copy: Wait) -> Wait:
        """Start a copy to the host; returns a function that waits for it."""
        return _started(self.to_host, copy, host_reads=True)

    def finish(self) -> None:
        """Wait until all weights are copied, which the script may change from now on."""
        if self.to_device is not None:
            self.to_device.synchronize()


class HostBucket:
    """The ``parameters`` of a bucket, in host memory, which ``link`` joins to the device that uses them.

    Their memory is pinned, if copies run beside computes. They are read when a load begins, so a script may
    change them between steps; a tensor that it puts in their place is copied synchronously.
    """

    def __init__(self, parameters: Mapping[str, Tensor], link: HostLink) -> None:
        self._parameters, self._link = parameters, link
        for parameter in parameters.values():
            if link.is_async and not parameter.is_pinned():
                parameter.data = pinned_copy(parameter.data)
        self._loaded: dict[str, Tensor] = {}
        self._stored: dict[str, Tensor] = {}
        self._leaving: list[Tensor] = []
        self._wait_load: Wait = _nothing
        self._wait_store: Wait = _nothing

    def start_load(self) -> None:
        """Start to copy the parameters to the device."""
        device = self._link.device
        self._loaded = {name: torch.empty_like(x, device=device) for name, x in self._parameters.items()}

        def copy() -> None:
            for name, parameter in self._parameters.items():
                self._loaded[name].copy_(parameter.detach(), non_blocking=True)

        self._wait_load = self._link.load(copy)

    def finish_load(self) -> Mapping[str, Tensor]:
        """The parameters on the device; work that is launched from now on waits for their copies."""
        self._wait_load()
        return self._loaded

    def drop(self) -> None:
        """Free the device memory of the parameters."""
        self._loaded = {}

    def start_store(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Start to copy gradients to the host. None stands for no gradient."""
        sums = {name: each for name, each in gradients.items() if each is not None}
        pinned = self._link.is_async
        self._leaving = [*sums.values()]
        self._stored = {name: host_memory_like(each, pinned) for name, each in sums.items()}

        def copy() -> None:
            for name, each in sums.items():
                self._stored[name].copy_(each, non_blocking=True)

        self._wait_store = self._link.store(copy)

    def finish_store(self) -> Mapping[str, Tensor]:
        """The gradients on the host, once they are copied. Their device memory is free then."""
        self._wait_store()
        self._leaving.clear()
        stored, self._stored = self._stored, {}
        return stored


def host_memory_like(tensor: Tensor, pinned: bool) -> Tensor:
    """Memory on the host for a copy of a tensor."""
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned)


def _started(stream: CopyStream | None, copy: Wait, host_reads: bool = False) -> Wait:
    if stream is not None:
        return stream.start(copy, host_reads)
    copy()
    return _nothing


def _nothing() -> None:
    """A synchronous copy needs no waiting."""
