"""Predicts the memory of an optimizer's state, and the temporary memory of an update.

An update is made on meta, which computes nothing, or on small tensors.
"""

import contextlib
import math
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipec.runtime.memory.storage import tensors_in
from pipec.runtime.optimizers.factory import Factory, call_factory, parameter_on
from pipec.torch_compat.run_time import TorchDispatchMode

Sizes = dict[int, int] | None
"""Maps each trial size to the parameter's size that it replaces; None if nothing is replaced."""

_SMALL = (11, 13, 17, 19, 23, 29, 31, 37)
"""Trial sizes: primes, so that the state has such a size only where the parameter's size is meant."""


def state_bytes(factory: Factory, parameters: Mapping[str, Tensor]) -> dict[str, int] | None:
    """The bytes of optimizer state for each whole parameter after an update; None if not predictable.

    ``parameters`` are those of the model, or equal ones on meta. The update runs on meta. If the optimizer
    reads values, it runs on small tensors instead, and each trial size in its state is replaced by the
    parameter's.
    """
    with contextlib.suppress(Exception):  # whatever an optimizer raises that cannot run on meta
        return _bytes(factory, parameters, dict.fromkeys(parameters), "meta")
    with contextlib.suppress(Exception):  # or not on a CPU; or whose state has other sizes
        return _bytes(factory, parameters, {name: _small(each) for name, each in parameters.items()}, "cpu")
    return None


def _bytes(
    factory: Factory, parameters: Mapping[str, Tensor], sizes: Mapping[str, Sizes], device: str
) -> dict[str, int]:
    """The bytes of the state after an update."""
    tried = {name: _made(each, sizes[name], device) for name, each in parameters.items()}
    optimizers = call_factory(factory, tried)
    representatives = _representatives(optimizers)
    for parameter in representatives.values():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    for each in optimizers:
        each.step()
    state = {key: entries for each in optimizers for key, entries in each.state.items()}
    return {
        name: sum(
            _real_numel(entry.shape, sizes[name]) * entry.element_size()
            for entry in tensors_in(state.get(representatives.get(parameter, parameter)))
        )
        for name, parameter in tried.items()
    }


def _representatives(optimizers: Iterable[Optimizer]) -> dict[Tensor, Tensor]:
    """For each parameter, the first one in its group with equal state, which alone is updated."""
    first: dict[Any, Tensor] = {}
    return {
        each: first.setdefault((id(group), each.shape, each.dtype, each.requires_grad), each)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
    }


def _made(parameter: Tensor, sizes: Sizes, device: str) -> nn.Parameter:
    """The parameter with trial sizes, on ``device``."""
    trial = {size: small for small, size in sizes.items()} if sizes else {}
    shape = [trial.get(size, size) for size in parameter.shape]
    return parameter_on(torch.zeros(shape, dtype=parameter.dtype, device=device), parameter)


def _small(parameter: Tensor) -> dict[int, int]:
    return dict(zip(_SMALL, sorted({*parameter.shape}), strict=False)) | {0: 0, 1: 1}


def _real_numel(shape: Iterable[int], sizes: Sizes) -> int:
    return math.prod(shape if sizes is None else (sizes[size] for size in shape))


def update_scratch(factory: Factory, parameters: Mapping[str, Tensor], on_cuda: bool) -> tuple[float, bool]:
    """Temporary bytes of an update for each byte of a parameter, and whether it updates all at once.

    Measured with the largest parameter. On GPUs torch's own optimizers update all parameters with one call.
    Returns ``(0.0, False)`` for an optimizer that cannot run on meta.
    """
    trained = {name: each.nbytes for name, each in parameters.items() if each.requires_grad}
    if trained:
        with contextlib.suppress(Exception):  # whatever an optimizer raises that cannot run on meta
            return _measured(factory, parameters, max(trained, key=trained.__getitem__), on_cuda)
    return 0.0, False


def _measured(
    factory: Factory, parameters: Mapping[str, Tensor], largest: str, on_cuda: bool
) -> tuple[float, bool]:
    tried = {name: _made(each, None, "meta") for name, each in parameters.items()}
    optimizers = call_factory(factory, tried)
    groups = [group for each in optimizers for group in each.param_groups if "foreach" in group]
    for group in groups if on_cuda else ():
        if group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    tried[largest].grad = torch.empty_like(tried[largest])
    with _AllocatedBytes() as allocated:
        for each in optimizers:
            each.step()
    share = (allocated.most - allocated.now) / max(tried[largest].nbytes, 1)
    return share, any(group["foreach"] for group in groups)


class _AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators allocate, while something refers to them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        passed = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        made = {id(x.untyped_storage()): x.untyped_storage() for x in tensors_in(result)}
        for key in made.keys() - passed:
            weakref.finalize(made[key], self._count, -made[key].nbytes())
            self._count(made[key].nbytes())
        return result

    def _count(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)
