"""Measures what the ranks of a pipeline hold during a step, to check what ``pipe.memory()`` predicts.

On a GPU that a rank has for itself, the figures are those of torch's allocator. Else the tensors are counted
that a rank's thread makes. Ranks of one process pass tensors by reference, so that a message's memory belongs
to no particular rank: while it is measured, each message is copied into a buffer of its reader, and its
sender keeps it as gloo does. So one process holds what several would.

Import this before pipelines are made whose ranks share a process.
"""

import contextlib
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pipec
from pipec.ir import Instruction, Op, RankMemory, Sizes
from pipec.ir.text_format import evaluate_dim
from pipec.plan.step_memory import StepMemory
from pipec.runtime.memory.storage import tensors_in
from pipec.runtime.messages import collective_group, transport
from pipec.runtime.messages.connections import MAX_IN_TRANSIT
from pipec.runtime.optimizers.stage_optimizer import OffloadedState
from pipec.runtime.stages import flat_bucket, host_bucket, host_copies
from pipec.runtime.step.interpreter import Interpreter

TensorsByUse = Mapping[str, Iterable[Tensor]]
"""Tensors by their use, one of ``pipec.ir.memory_figures.MEMORY_CATEGORIES``."""

UNCOUNTED: list[tuple[Any, str]] = [
    *((host_copies, "host_memory"), (host_bucket, "host_memory_like"), (flat_bucket, "host_memory_like")),
    *((collective_group, name) for name in ("_all_reduce", "_reduce_scatter", "_all_gather")),
    (OffloadedState, "_copied"),
]
"""Functions that make tensors on the host, or in the memory of another rank."""

_current = threading.local()


def measure_memory(pipe: pipec.Pipeline, *args: Any, **kwargs: Any) -> StepMemory:
    """Run ``pipe.step`` with these arguments; returns what each rank held. Every rank calls this."""
    found: dict[int, RankMemory] = {}

    def execute(interpreter: Interpreter, actions: Sequence[Callable[[], None]], _: object) -> None:
        rank, device = interpreter.number, interpreter.device
        on_device = sum(each == device for each in pipe.ranks.devices.values())
        meter = CudaMemoryMeter(device) if device.type == "cuda" and on_device == 1 else TensorMemoryMeter()
        with meter:
            meter.begin(_memory_at_start(interpreter))
            instructions = interpreter._part.instructions
            for position, action in enumerate(actions):
                interpreter.position = position
                is_on_host = [each.op for each in instructions[position : position + 1]] == [Op.HOST_UPDATE]
                with _uncounted() if is_on_host else contextlib.nullcontext():
                    action()
                if position < len(instructions):
                    meter.note(sum(_host_bytes(interpreter, each) for each in interpreter.stages))
        found[rank] = max(found.get(rank), meter.memory(rank), key=lambda x: x.peak_bytes if x else -1)

    with mock.patch.object(Interpreter, "_execute", execute), contextlib.ExitStack() as stack:
        for owner, name in UNCOUNTED:
            stack.enter_context(mock.patch.object(owner, name, _uncounted()(getattr(owner, name))))
        pipe.step(*args, **kwargs)
    if pipe.ranks.world.is_distributed:
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, found)
        found = {rank: memory for each in everyones for rank, memory in each.items()}
    return StepMemory([found[rank] for rank in sorted(found)], pipe.programs)


# what a rank holds before its first instruction


def _memory_at_start(interpreter: Interpreter) -> dict[str, list[Tensor]]:
    """The memory of the rank, by kind.

    Replicas of one process share parameters and state; each is counted with what it would have.
    """
    found: dict[str, list[Tensor]] = defaultdict(list)
    for index, stage in interpreter.stages.items():
        constants = [each for frame in stage.frames for each in frame.get("constants", ())]
        found["parameters"] += stage.weights
        found["gradients"] += [each.grad for each in stage.weights if each.grad is not None]
        found["gradients"] += [x._sums for x, _ in {*stage.gradients._homes.values()} if x._sums is not None]  # type: ignore[attr-defined]
        found["buffers"] += [*stage.buffers, *(each for each in constants if isinstance(each, Tensor))]
        found["inputs"] += [frame[x] for frame in stage.frames for x in stage.inputs if x in frame]
        if own := _update_of(interpreter, index):
            shards = [shard for shard in own.shards.values() if not shard.on_host]
            found["optimizer"] += [] if _host_weights(interpreter, index) else _state_on_device(own)
            found["parameters"] += [shard._own for shard in shards]
            found["gradients"] += [x._gradient for x in shards if x._gradient is not None]
    found["received"] += _received(interpreter.transport)
    return found


def _state_on_device(optimizer: Any) -> list[Tensor]:
    away = {id(host) for host in optimizer._host._hosts.values()} if optimizer._host else set()
    state = (each for one, _ in optimizer._optimizers for each in tensors_in(one.state))
    return [each for each in state if id(each) not in away]


def _update_of(interpreter: Interpreter, stage: int) -> Any:
    """What the rank updates of a stage, or what the replica does with which it shares the parameters."""
    updates, first = interpreter.updates, interpreter.plan.placement[stage][0]
    if updates is None:
        return None
    return updates.on(interpreter.number, stage) or updates.on(first, stage)


def _host_bytes(interpreter: Interpreter, stage: int) -> int:
    """The bytes of a stage in host memory."""
    own, frames = _update_of(interpreter, stage), interpreter.stages[stage].frames
    saved = (x for frame in frames for x in frame.get("saved", ()))
    offloaded = (x for x in saved if isinstance(x, host_copies.OffloadedValue))
    state = own._host._hosts.values() if own and own._host else ()
    if weights := _host_weights(interpreter, stage):
        state = [*weights, *(_state_on_device(own) if own else [])]
    return sum(x.untyped_storage().nbytes() for x in state) + sum(len(p) for x in offloaded for p in x.host)


def _host_weights(interpreter: Interpreter, stage: int) -> list[Tensor]:
    """The weights of a stage that are in host memory, whole or in shards, and their gradients."""
    whole, own = interpreter.stages[stage].on_host.values(), _update_of(interpreter, stage)
    shards = [x for x in own.shards.values() if x.on_host] if own else []
    gradients = [*(each.grad for each in whole), *(each._gradient for each in shards)]
    return [*whole, *(each._own for each in shards), *(each for each in gradients if each is not None)]


def _received(endpoint: Any) -> list[Tensor]:
    """The memory for messages that stays from step to step: all tensors that a transport holds."""
    if isinstance(endpoint, transport._Endpoint):
        return []
    found, known, pending = list[Tensor](), set[int](), [endpoint]
    while pending:
        each = pending.pop()
        if id(each) in known:
            continue
        known.add(id(each))
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, Mapping):
            pending += each.values()
        elif isinstance(each, list | tuple | set | deque):
            pending += each
        elif type(each).__module__.startswith("pipec.runtime.messages"):
            pending += vars(each).values() if hasattr(each, "__dict__") else ()
    return found


# messages between ranks of one process as between several


_plain_sender, _plain_receiver = transport._Endpoint.sender, transport._Endpoint.receiver


def _sender(endpoint: Any, instruction: Instruction, tag: int) -> Callable[[Sequence[Tensor], Sizes], None]:
    """A send that also keeps sent messages alive while memory is measured, as gloo does."""
    send, key = _plain_sender(endpoint, instruction, tag), (instruction.link, instruction.peer)

    def metered(tensors: Sequence[Tensor], sizes: Sizes) -> None:
        if meter := current_meter():
            in_transit = meter.kept.setdefault(key, deque(maxlen=MAX_IN_TRANSIT))
            in_transit.append([tensor.contiguous() for tensor in tensors])
            with _uncounted():
                tensors = [tensor.clone() for tensor in tensors]
        send(tensors, sizes)

    return metered


def _receiver(endpoint: Any, instruction: Instruction, tag: int) -> "_Receiver":
    device = endpoint._ranks.devices[endpoint._rank]
    return _Receiver(_plain_receiver(endpoint, instruction, tag), instruction, device)


class _Receiver:
    """A receive instruction whose messages are copied into memory of their own while memory is measured."""

    def __init__(self, receiver: Any, instruction: Instruction, device: torch.device) -> None:
        assert instruction.link is not None
        self._plain, self._values, self._device = receiver, instruction.link.values, device
        self._into: Sequence[Tensor] = ()

    def post(self, sizes: Sizes) -> None:
        self._plain.post(sizes)
        if current_meter():
            self._into = [
                torch.empty(
                    [evaluate_dim(dim, sizes) for dim in value.shape],
                    dtype=getattr(torch, value.dtype),
                    device=self._device,
                )
                for value in self._values
            ]

    def wait(self) -> Sequence[Tensor]:
        arrived = self._plain.wait()
        into, self._into = self._into, ()
        return [own.copy_(tensor) for own, tensor in zip(into, arrived, strict=True)] if into else arrived


transport._Endpoint.sender = _sender  # type: ignore[method-assign]
transport._Endpoint.receiver = _receiver  # type: ignore[method-assign, assignment]


# meters


def current_meter() -> "TensorMemoryMeter | None":
    """The meter that counts the tensors of this thread, if one does."""
    return getattr(_current, "meter", None)


@contextlib.contextmanager
def _uncounted() -> Iterator[None]:
    """Do not count tensors made inside a ``with``, or by a function: another rank has them, or the host."""
    if (meter := current_meter()) is None:
        yield
        return
    before, meter.is_paused = meter.is_paused, True
    try:
        yield
    finally:
        meter.is_paused = before


class _Readings:
    """Bytes at the start by use, and for each instruction the most, those after it, and those on the host."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.rows: list[tuple[float, float, float]] = []

    def memory(self, rank: int) -> RankMemory:
        most, after, host = np.array(self.rows, dtype=float).T
        peak = int(most.argmax())
        parts = {**self.first, "step": float(most[peak]) - sum(self.first.values())}
        most_on_host = float(host.max())
        return RankMemory(rank, parts, peak, host_bytes=most_on_host, most=most, after=after, host_after=host)


class CudaMemoryMeter(_Readings, contextlib.AbstractContextManager["CudaMemoryMeter"]):
    """Reads the allocator of one GPU, which counts all the time: the tensors of the rank."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device, self._others = device, 0.0

    def __exit__(self, *raised: object) -> None:
        """Nothing is to be undone."""

    def begin(self, held: TensorsByUse) -> None:
        self.first = {
            kind: sum(storage.nbytes() for storage in found) for kind, found in _storages_by_use(held).items()
        }
        self._others = torch.cuda.memory_allocated(self._device) - sum(self.first.values())
        torch.cuda.reset_peak_memory_stats(self._device)

    def note(self, host_bytes: int = 0) -> None:
        most = torch.cuda.max_memory_allocated(self._device) - self._others
        after = torch.cuda.memory_allocated(self._device) - self._others
        self.rows.append((most, after, host_bytes))
        torch.cuda.reset_peak_memory_stats(self._device)


class TensorMemoryMeter(TorchDispatchMode, _Readings):
    """Counts the memory of the tensors that this thread's operators make, while it is referenced.

    A view has no memory of its own, and keeps its base's alive. Memory used inside kernels is not counted.
    ``kept`` holds objects alive until the measurement ends.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        _Readings.__init__(self)
        self._lock = threading.RLock()
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._now = self._most = 0
        self.is_paused = False
        self.kept: dict[object, Any] = {}

    def __enter__(self) -> Self:
        _current.meter = self
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        _current.meter = None
        super().__exit__(*raised)
        self.kept.clear()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.is_paused:
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
            self.first[kind] = self._now - before
        self._most = self._now

    def note(self, host_bytes: int = 0) -> None:
        with self._lock:
            self.rows.append((self._most, self._now, host_bytes))
            self._most = self._now

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
