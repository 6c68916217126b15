"""Optimizer state in host memory: copied to the device for an update, and back after it."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer


class OffloadedState:
    """Keeps the tensors of the optimizer state on the host.

    Tensors that an optimizer itself keeps on the host, such as step counts, stay there.
    """

    def __init__(self) -> None:
        self._hosts: dict[tuple[int, str], Tensor] = {}

    @contextlib.contextmanager
    def on_device(self, optimizer: Optimizer) -> Iterator[None]:
        """Copy the state to the device of its parameters for the duration of a ``with`` block."""
        for parameter, entries in _of_parameters(optimizer):
            for key, value in entries.items():
                if isinstance(value, Tensor) and value is self._hosts.get((id(parameter), key)):
                    entries[key] = value.to(parameter.device, copy=True)
        try:
            yield
        finally:
            self.offload_state(optimizer)

    def offload_state(self, optimizer: Optimizer) -> None:
        """Copy the state that is on the device of its parameter to the host."""
        for parameter, entries in _of_parameters(optimizer):
            for key, value in entries.items():
                known = self._hosts.get((id(parameter), key))
                if isinstance(value, Tensor) and value.device == parameter.device and value is not known:
                    entries[key] = self._hosts[id(parameter), key] = self._copied(known, value)

    def _copied(self, host: Tensor | None, value: Tensor) -> Tensor:
        """A copy on the host, in the memory of the previous one if layouts are equal."""
        if host is None or _layout(host) != _layout(value):
            host = torch.empty_like(value, device="cpu", pin_memory=value.device.type == "cuda")
        return host.copy_(value)


def _of_parameters(optimizer: Optimizer) -> list[tuple[Tensor, dict[str, object]]]:
    return [(key, entries) for key, entries in optimizer.state.items() if isinstance(key, Tensor)]


def _layout(tensor: Tensor) -> object:
    return tensor.dtype, tensor.shape, tensor.stride()
