"""Predicts the temporary memory of an update by running one on meta, which computes nothing."""

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor

from pipec.runtime.memory.meter import TensorMemoryMeter
from pipec.runtime.optimizers.factory import Factory, call_factory, parameter_on


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
    with TensorMemoryMeter() as meter:
        meter.begin({})
        for each in optimizers:
            each.step()
        meter.note()
    found = meter.memory(0)
    share = float(found.most[0] - found.after[0]) / max(tried[largest].nbytes, 1)
    return share, any(group["foreach"] for group in groups)
