"""Casts the arguments of pipec's operators under autocast, which knows torch's own operators alone."""

from typing import Any

import torch
from torch import Tensor

from pipec.torch_compat import pytree


def cast_under_autocast(tensors: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The tensors in ``dtype``, by default that of autocast; as they are where autocast is off.

    As for torch's operators, float64 stays. The meta device has no autocast.
    """
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return tensors
    dtype = dtype or torch.get_autocast_dtype(device.type)
    return pytree.tree_map_only(Tensor, lambda x: x if x.dtype is torch.float64 else x.to(dtype), tensors)
