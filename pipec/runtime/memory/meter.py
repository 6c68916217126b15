"""Measures the memory of a rank during a step: counted bytes of tensors, or figures of CUDA's allocator."""

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from pipec.ir import RankMemory
from pipec.runtime.memory.storage import tensors_in
from pipec.torch_compat.operators import TorchDispatchMode

TensorsByUse = Mapping[str, Iterable[Tensor]]
"""Tensors by their use, one of ``pipec.ir.memory_figures.MEMORY_CATEGORIES``."""


class MemoryMeter(Protocol):
    """Measures the rank whose program this thread runs inside a ``with``."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...

    def begin(self, held: TensorsByUse) -> None:
        """Count the tensors of the rank before its first instruction."""

    def note(self, host_bytes: int = 0) -> None:
        """Record the peak since the previous instruction, and the bytes offloaded to host memory."""

    def memory(self, rank: int) -> RankMemory:
        """The measurements. Tensors that the step itself made have the use "step"."""


def make_memory_meter(device: torch.device, is_shared: bool) -> MemoryMeter:
    """The meter of a rank. Ranks that share a GPU count their tensors: its allocator has one count."""
    return CudaMemoryMeter(device) if device.type == "cuda" and not is_shared else TensorMemoryMeter()


def current_memory_meter() -> "TensorMemoryMeter | None":
    """The meter that counts the tensors of this thread, if one does."""
    return getattr(_current, "meter", None)


_current = threading.local()


def uncounted() -> AbstractContextManager[None]:
    """Count nothing for this thread's rank inside a ``with``."""
    meter = current_memory_meter()
    return meter.paused() if meter else nullcontext()


class _Readings:
    """The readings of a meter: bytes at the start by use, and two figures for each instruction."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self._most: list[float] = []
        self._after: list[float] = []
        self._host: list[float] = []
        self._reserved_bytes = 0

    def add(self, most: float, after: float, host_bytes: int, reserved_bytes: int = 0) -> None:
        self._most.append(most)
        self._after.append(after)
        self._host.append(host_bytes)
        self._reserved_bytes = max(self._reserved_bytes, reserved_bytes)

    def memory(self, rank: int) -> RankMemory:
        most, after = np.array(self._most), np.array(self._after)
        peak = int(most.argmax())
        parts = {**self.first, "step": float(most[peak]) - sum(self.first.values())}
        host = np.array(self._host)
        return RankMemory(
            rank,
            parts,
            peak,
            host_bytes=float(host.max()),
            most=most,
            after=after,
            host_after=host,
            reserved_bytes=self._reserved_bytes,
        )


class CudaMemoryMeter:
    """Reads the allocator of one GPU: the tensors of the rank, and all that the allocator has reserved."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._readings = device, _Readings()
        self._others = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Do nothing: the allocator counts all the time."""

    def begin(self, held: TensorsByUse) -> None:
        self._readings.first = {
            kind: sum(storage.nbytes() for storage in found) for kind, found in _storages_by_use(held).items()
        }
        self._others = torch.cuda.memory_allocated(self._device) - sum(self._readings.first.values())
        torch.cuda.reset_peak_memory_stats(self._device)

    def note(self, host_bytes: int = 0) -> None:
        most = torch.cuda.max_memory_allocated(self._device) - self._others
        after = torch.cuda.memory_allocated(self._device) - self._others
        self._readings.add(most, after, host_bytes, torch.cuda.max_memory_reserved(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)

    def memory(self, rank: int) -> RankMemory:
        return self._readings.memory(rank)


class TensorMemoryMeter(TorchDispatchMode):
    """Counts the memory of the tensors that this thread's operators make, while it is referenced.

    A view has no memory of its own, and keeps its base's alive. Memory used inside kernels is not counted.
    ``kept`` holds objects alive until the measurement ends.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._readings, self._lock = _Readings(), threading.RLock()
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._now = self._most = 0
        self._is_paused = False
        self.kept: dict[object, Any] = {}

    def __enter__(self) -> Self:
        _current.meter = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        _current.meter = None
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self.kept.clear()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        passed = {id(storage) for tensor in tensors_in((args, kwargs)) for storage in _storages(tensor)}
        for tensor in tensors_in(result):
            for storage in _storages(tensor):
                if id(storage) not in passed or id(storage) in self._known:
                    self._count(storage)
        return result

    def begin(self, held: TensorsByUse) -> None:
        for kind, found in _storages_by_use(held).items():
            before = self._now
            for storage in found:
                self._count(storage)
            self._readings.first[kind] = self._now - before
        self._most = self._now

    def note(self, host_bytes: int = 0) -> None:
        with self._lock:
            self._readings.add(self._most, self._now, host_bytes)
            self._most = self._now

    def memory(self, rank: int) -> RankMemory:
        return self._readings.memory(rank)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count tensors made inside a ``with``: they are another rank's."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        with self._lock:
            known, before = self._known.get(key, (None, 0))
            self._known[key] = known or weakref.ref(storage, lambda _: self._forget(key)), size
            self._now += size - before
            self._most = max(self._most, self._now)

    def _forget(self, key: int) -> None:
        with self._lock:
            _, size = self._known.pop(key)
            self._now -= size


def _storages_by_use(held: TensorsByUse) -> dict[str, list[torch.UntypedStorage]]:
    """The memory of each use. Memory with several uses counts for the first of them."""
    known = set[int]()
    found: dict[str, list[torch.UntypedStorage]] = {}
    for kind, tensors in held.items():
        own = {id(storage): storage for tensor in tensors for storage in _storages(tensor)}
        found[kind] = [storage for key, storage in own.items() if key not in known]
        known |= own.keys()
    return found


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The storages of a tensor; a sparse one has two, for its indices and values."""
    parts = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
    return [part.untyped_storage() for part in parts]
