"""Predicts the temporary memory of an update by running one on meta, which computes nothing."""

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipec.runtime.memory.storage import tensors_in
from pipec.runtime.optimizers.factory import Factory, call_factory, parameter_on
from pipec.torch_compat.operators import TorchDispatchMode


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
    tried = {name: parameter_on(torch.empty_like(x, device="meta"), x) for name, x in parameters.items()}
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
