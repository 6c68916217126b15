"""Optimizer state in host memory: copied to the device for an update, and back after it."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


class OffloadedState:
    """Keeps the tensors of the optimizer state on the host. ``named`` maps ids of parameters to names.

    Tensors that an optimizer itself keeps on the host, such as step counts, stay there.
    """

    def __init__(self, named: Mapping[int, str]) -> None:
        self._named = named
        self._hosts: dict[tuple[str, str], Tensor] = {}

    @contextlib.contextmanager
    def on_device(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Copy the state to the device of its parameters for the duration of a ``with`` block."""
        for optimizer, parameter, key, value in _entries(optimizers):
            if value is self._hosts.get(self._key(parameter, key)):
                optimizer.state[parameter][key] = value.to(parameter.device, copy=True)
        try:
            yield
        finally:
            self.offload_state(optimizers)

    def offload_state(self, optimizers: Sequence[Optimizer]) -> None:
        """Copy the state that is on the device of its parameter to the host."""
        for optimizer, parameter, key, value in _entries(optimizers):
            name = self._key(parameter, key)
            if value.device == parameter.device and value is not self._hosts.get(name):
                optimizer.state[parameter][key] = self._copied(name, value)

    def _copied(self, name: tuple[str, str], value: Tensor) -> Tensor:
        """A copy on the host, in the memory of the previous copy if layouts are equal."""
        host = self._hosts.get(name)
        if host is None or _layout(host) != _layout(value):
            host = torch.empty_like(value, device="cpu", pin_memory=value.device.type == "cuda")
            self._hosts[name] = host
        return host.copy_(value)

    def _key(self, parameter: Tensor, key: str) -> tuple[str, str]:
        return self._named.get(id(parameter), ""), key


def _layout(tensor: Tensor) -> object:
    return tensor.dtype, tensor.shape, tensor.stride()


def _entries(optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, Tensor, str, Tensor]]:
    """The tensors of the state, each with its optimizer, its parameter and its name."""
    return [
        (optimizer, parameter, key, value)
        for optimizer in optimizers
        for parameter, entries in optimizer.state.items()
        if isinstance(parameter, Tensor)
        for key, value in entries.items()
        if isinstance(value, Tensor)
    ]
