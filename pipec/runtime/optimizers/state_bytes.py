"""How much memory the state of an optimizer takes, learned from an update that computes next to nothing."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipec.runtime.optimizers.factory import Factory, call_factory, parameter_on

_SMALL = (11, 13, 17, 19, 23, 29, 31, 37)
"""Sizes that stand for those of a parameter: primes, so that a state has them for no other reason."""


def state_bytes(factory: Factory, parameters: Mapping[str, Tensor]) -> dict[str, int] | None:
    """The bytes that the factory's optimizers keep for each whole parameter once they have updated it.

    ``parameters`` are those of the model, or others like them on meta. The update is made on meta. An
    optimizer that looks at values makes it on small tensors, and the sizes that its state has in common with
    those are taken for the parameter's. None if it can do neither.
    """
    with contextlib.suppress(Exception):  # whatever an optimizer raises that cannot run on meta
        return _bytes(factory, parameters, dict.fromkeys(parameters), "meta")
    with contextlib.suppress(Exception):  # or not on a CPU; or a size of its state has no counterpart
        return _bytes(factory, parameters, {name: _small(each) for name, each in parameters.items()}, "cpu")
    return None


def _bytes(
    factory: Factory,
    parameters: Mapping[str, Tensor],
    sizes: Mapping[str, dict[int, int] | None],
    device: str,
) -> dict[str, int]:
    """What an update leaves. ``sizes[name]`` has the size in the parameter by the size that is tried."""
    tried = {name: _made(each, sizes[name], device) for name, each in parameters.items()}
    optimizers = call_factory(factory, tried)
    for each in optimizers:
        each.step()
    state = {key: entries for each in optimizers for key, entries in each.state.items()}
    return {
        name: sum(
            _real_numel(entry.shape, sizes[name]) * entry.element_size()
            for entry in _tensors(state.get(each))
        )
        for name, each in tried.items()
    }


def _made(parameter: Tensor, sizes: dict[int, int] | None, device: str) -> nn.Parameter:
    """A parameter to be updated, with a gradient if the real one will have one."""
    tried = {size: small for small, size in sizes.items()} if sizes else {}
    shape = [tried.get(size, size) for size in parameter.shape]
    made = parameter_on(torch.zeros(shape, dtype=parameter.dtype, device=device), parameter)
    made.grad = torch.ones_like(made) if parameter.requires_grad else None
    return made


def _small(parameter: Tensor) -> dict[int, int]:
    return dict(zip(_SMALL, sorted({*parameter.shape} - {0, 1}), strict=False)) | {0: 0, 1: 1}


def _real_numel(shape: Iterable[int], sizes: dict[int, int] | None) -> int:
    return math.prod(shape if sizes is None else (sizes[size] for size in shape))


def _tensors(kept: Any) -> Iterator[Tensor]:
    """The tensors of a state, which may lie in lists and dictionaries."""
    if isinstance(kept, Tensor):
        yield kept
    elif isinstance(kept, Mapping):
        yield from (each for value in kept.values() for each in _tensors(value))
    elif isinstance(kept, list | tuple):
        yield from (each for value in kept for each in _tensors(value))
