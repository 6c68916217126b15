"""CUDA graphs without a GPU: what a graph would launch again is computed again, into the memory of then."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipec.runtime.memory.storage import tensors_in


class ReplayedGraphs:
    """A recorder as ``runtime.messages.cuda.CudaGraphRecorder`` is. It counts recordings and replays."""

    num_recorded = num_replayed = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self, call: Callable[[], object]) -> None:
        call()

    def record(self, call: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Any, Any]:
        with _Capturing():
            made = call()
        ReplayedGraphs.num_recorded += 1

        def replay() -> None:
            ReplayedGraphs.num_replayed += 1
            for old, new in zip(tensors_in(made), tensors_in(call()), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.untyped_storage().copy_(new.untyped_storage())

        return made, replay


_ATEN = torch.ops.aten
_WAITING = {_ATEN._local_scalar_dense.default, _ATEN.nonzero.default, _ATEN.masked_select.default}


class _Capturing(TorchDispatchMode):
    """What asks for a value fails, as it does on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        selects = func is _ATEN.index.Tensor and any(x is not None and x.dtype is torch.bool for x in args[1])
        if func in _WAITING or selects:
            raise RuntimeError("operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))
