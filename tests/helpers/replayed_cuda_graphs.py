"""CUDA graphs without a GPU: what a graph would launch again is computed again, into the memory of then.

A graph may write to all of its pool that was free when it was recorded, and so wherever graphs that were
recorded later in this pool have left something. There a replay leaves NaN, or the largest number.

A function that runs as it is may not read what a recorded one has made. On a GPU, attention that draws leaves
the state of its generator on the host, but in device memory while it is recorded; its gradient follows the
pointer either way, and a wrong one ends the process.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipec.runtime.memory.storage import tensors_in

T = TypeVar("T")

Memory = dict[int, torch.UntypedStorage]
"""Storages by address."""


class ReplayedGraphs:
    """A recorder as ``runtime.messages.cuda.CudaGraphRecorder`` is. It counts recordings and replays."""

    num_recorded = num_replayed = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._recorded: Memory = {}

    def new_pool(self) -> list[Memory]:
        """What each graph of a pool has taken of it, in the order of the recordings."""
        return []

    def warm_up(self, call: Callable[[], T]) -> T:
        with _Eager(self._recorded):
            return call()

    def record(
        self, call: Callable[[], Any], generators: Sequence[torch.Generator], pool: list[Memory]
    ) -> tuple[Any, Any]:
        with _Capturing() as capturing:
            made = call()
        self._recorded |= capturing.memory
        pool.append(capturing.memory)
        number = len(pool)
        ReplayedGraphs.num_recorded += 1

        def replay() -> None:
            ReplayedGraphs.num_replayed += 1
            for later in pool[number:]:
                for storage in later.values():
                    storage.fill_(255)
            for old, new in zip(tensors_in(made), tensors_in(call()), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.untyped_storage().copy_(new.untyped_storage())

        return made, replay


_ATEN = torch.ops.aten
_WAITING = {_ATEN._local_scalar_dense.default, _ATEN.nonzero.default, _ATEN.masked_select.default}


class _Capturing(TorchDispatchMode):
    """What asks for a value fails, as it does on a GPU. New memory is noted in ``memory``."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Memory = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        selects = func is _ATEN.index.Tensor and any(x is not None and x.dtype is torch.bool for x in args[1])
        if func in _WAITING or selects:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        passed = {each.untyped_storage().data_ptr() for each in tensors_in((args, kwargs))}
        for each in tensors_in(result):
            storage = each.untyped_storage()
            if storage.data_ptr() not in passed:
                self.memory[storage.data_ptr()] = storage
        return result


class _Eager(TorchDispatchMode):
    """What reads memory that a graph has made ends the process."""

    def __init__(self, recorded: Memory) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tensors_in((args, kwargs)):
            assert each.untyped_storage().data_ptr() not in self._recorded, f"SIGSEGV in {func}"
        return func(*args, **(kwargs or {}))
