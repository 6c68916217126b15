"""Phase functions as CUDA graphs: recorded in a dry run, and replayed where a program calls them.

A dry run runs its program twice: every function as it is, on the recording stream, so that libraries load
kernels and allocate workspaces; then every function is recorded. No function runs as it is on values that a
graph made: attention leaves the state of its generator on the host, but on the GPU where it is recorded, and
its gradient reads it where the same mode leaves it.

A slot of a stage belongs to a microbatch from its first compute until its frame is freed. There are as many
slots as microbatches in flight; ``graph_slots`` assigns them from the program.

A graph reads and writes the memory with which it was recorded. Four rules make every order of replays right:

* Arguments that change between calls, such as messages and inputs, are first copied to memory of the slot.
* The graphs of a slot have a memory pool of their own. What one of them computes on the way may lie where a
  later one leaves results: the pool had that memory free when the later one was recorded. So a graph may not
  be replayed between such a later one and the readers of its results. In a slot it never is, because the
  functions of each microbatch run in one order. Slots run in any order, and share no pool.
* Values saved for a later phase stay where a graph of the slot wrote them.
* Other results are copied, inside the graph, to memory outside of the pools that all slots share, and taken
  from there before the same function is replayed for another slot: gradients are accumulated, and all others
  are copied once more.

So only the compute stream touches the memory of a graph, and only saved values stay in a pool from one replay
to the next.
"""

import contextlib
import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from operator import is_
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pipec.errors import InputError
from pipec.ir import Op, OpKind, Phase, Plan, Program, ShardingLevel, Stage
from pipec.runtime.memory.storage import tensors_in
from pipec.runtime.random_seeds import OperatorGenerators

T = TypeVar("T")

Function = Callable[..., Any]

_DATA_DEPENDENT = re.compile(r"\b(check_branch|primitives\.require)\(")
"""Calls in generated code whose results, or sizes, depend on values."""


_GraphKey = tuple[str, int, Hashable]
"""A function's name, the slot, and the sizes of its microbatches."""


class GraphRecorder(Protocol):
    """Records the kernels that a call launches on ``device``."""

    device: torch.device

    def warm_up(self, call: Callable[[], T]) -> T:
        """The results of a call that is not recorded, on the stream that records."""

    def new_pool(self) -> Any:
        """Memory for graphs that are replayed in the order in which they were recorded."""

    def record(
        self, call: Callable[[], T], generators: Sequence[torch.Generator], pool: Any
    ) -> tuple[T, Callable[[], None]]:
        """The results of the call, and a function that replays it into the memory of these results.

        The call allocates from ``pool``. It draws from ``generators`` alone; a replay starts from their
        present state.
        """


class _Mode(Enum):
    """What a call of a function does."""

    WARM_UP = "calls the function as it is"
    RECORD = "records it, if it has no graph yet, and replays the graph"
    REPLAY = "replays its graph"


class StageGraphs:
    """The functions of a stage as graphs: one for each slot and each size of microbatch."""

    def __init__(self, stage: Stage, code: Any, recorder: GraphRecorder) -> None:
        self._stage, self._code, self._recorder = stage, code, recorder
        self._moving = {
            "w": {code.PARAMETERS.index(name) for name in stage.borrowed_parameters},
            "buffers": {code.BUFFERS.index(name) for name in stage.updated_buffers},
        }
        self._memory: dict[Hashable, Tensor] = {}
        self._pools: dict[int, Any] = {}
        self._graphs: dict[Hashable, _Graph] = {}
        self._addresses: list[int] = []
        self._draws: dict[Hashable, list[int]] = {}
        self._mode = _Mode.REPLAY

    def warming_up(self) -> AbstractContextManager[None]:
        """Call functions as they are inside a ``with``, to record them afterwards."""
        return self._in_mode(_Mode.WARM_UP)

    def recording(self) -> AbstractContextManager[None]:
        """Record functions that have no graph yet inside a ``with``."""
        return self._in_mode(_Mode.RECORD)

    @contextlib.contextmanager
    def _in_mode(self, mode: "_Mode") -> Iterator[None]:
        self._mode = mode
        try:
            yield
        finally:
            self._mode = _Mode.REPLAY

    def forget_if_moved(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> bool:
        """Drop graphs that read former memory of weights or buffers; returns whether there were any."""
        lasting = [
            parameters[fqn] for fqn in self._stage.parameters if fqn not in self._stage.borrowed_parameters
        ]
        lasting += [buffers[fqn] for fqn in self._stage.buffers if fqn not in self._stage.updated_buffers]
        before, self._addresses = self._addresses, [tensor.data_ptr() for tensor in lasting]
        has_moved = bool(self._graphs) and before != self._addresses
        if has_moved:
            self._graphs.clear()
            self._pools.clear()
        return has_moved

    def function(self, name: str, phase: Phase, slot: int, sizes: Callable[[], Hashable]) -> Function:
        """A function for the microbatches of a slot; ``sizes`` returns their sizes at the call."""
        source: Function = getattr(self._code, name)

        def call(*args: Any) -> Any:
            key = name, slot, sizes()
            if self._mode is _Mode.WARM_UP:
                return self._warm_up(source, key, args)
            if key not in self._graphs:
                self._graphs[key] = self._record(source, phase, key, args)
            return self._graphs[key](args)

        return call

    def precomputed(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The results of ``precompute``, copied to the memory that graphs read."""
        return tuple(
            self._place(("precomputed", number, each.shape), each).copy_(each)
            if isinstance(each, Tensor)
            else each
            for number, each in enumerate(values)
        )

    def _warm_up(self, source: Function, key: _GraphKey, args: Sequence[Any]) -> Any:
        """Call a function as it is. Note which of its operators draw, in order, and place its results."""
        name, _, sizes = key
        drawn = self._draws[key] = []

        def noting(rng: OperatorGenerators) -> Callable[[int], torch.Generator]:
            def draw(operator: int) -> torch.Generator:
                drawn.append(operator)
                return rng(operator)

            return draw

        passed = [noting(x) if isinstance(x, OperatorGenerators) else x for x in args]
        with self._explained(key):
            returned = self._recorder.warm_up(lambda: source(*passed))
            self._leave(returned, (name, sizes))
        return returned

    def _record(self, source: Function, phase: Phase, key: _GraphKey, args: Sequence[Any]) -> "_Graph":
        name, slot, sizes = key
        if self._mode is not _Mode.RECORD:
            raise InputError(
                f"{self._label(key)} was not recorded for microbatches of {sizes}; pass kernels='source'"
            )
        names = tuple(inspect.signature(source).parameters)
        own, moving = self._arguments(names, args, (slot, sizes))
        drawn = self._draws.pop(key)
        generators = [torch.Generator(self._recorder.device) for _ in drawn]

        def call() -> Any:
            rng = _one_by_one(generators)
            passed = [
                rng if isinstance(x, OperatorGenerators) else [*x] if isinstance(x, list) else x for x in own
            ]
            return self._leave(source(*passed), (name, sizes))

        for each in moving:
            each.fill(args)
        with self._explained(key):
            results, replay = self._recorder.record(call, generators, self._pool(slot))
            self._require_on_device([*own, results])
        draws = list(zip(drawn, generators, strict=True))
        arguments = dict(zip(names, own, strict=True))
        return _Graph(arguments, moving, draws, results, phase is Phase.FORWARD, replay)

    @contextlib.contextmanager
    def _explained(self, key: _GraphKey) -> Iterator[None]:
        """Raise InputError for whatever fails inside a ``with``."""
        try:
            yield
        except Exception as error:
            first = error.__context__ or error  # ending a failed recording raises another error
            raise InputError(
                f"kernels='cudagraphs' cannot record {self._label(key)}, which must launch the same kernels "
                f"for all values: {type(first).__name__}: {str(first).strip()}. Pass kernels='source'"
            ) from error

    def _label(self, key: _GraphKey) -> str:
        return f"{key[0]} of stage {self._stage.index}"

    def _arguments(
        self, names: Sequence[str], args: Sequence[Any], owner: Hashable
    ) -> tuple[list[Any], list["_CopiedArgument"]]:
        """The arguments of a graph, and those that are copied before each replay."""
        own, moving = list[Any](), list[_CopiedArgument]()
        for position, (name, value) in enumerate(zip(names, args, strict=True)):
            if isinstance(value, Tensor):
                own.append(self._place((owner, name), value))
                moving.append(_CopiedArgument(own[-1], position))
            elif isinstance(value, list):
                own.append([*value])
                for index in self._moving.get(name, ()):
                    own[-1][index] = self._place((owner, name, index), value[index])
                    moving.append(_CopiedArgument(own[-1][index], position, index))
            else:
                own.append(value)
        return own, moving

    def _pool(self, slot: int) -> Any:
        """The memory pool of a slot."""
        if slot not in self._pools:
            self._pools[slot] = self._recorder.new_pool()
        return self._pools[slot]

    def _leave(self, returned: Any, path: tuple[Hashable, ...]) -> Any:
        """Copy results to memory that all slots share. A list holds saved values, which stay.

        The first call for a ``path`` allocates, and so is that of a warm-up, outside of pools.
        """
        match returned:
            case Tensor():
                if returned.layout is not torch.strided:
                    raise TypeError(f"a tensor of layout {returned.layout} has no memory of a fixed size")
                return self._place(path, returned).copy_(returned)
            case dict():
                return {name: self._leave(each, (*path, name)) for name, each in returned.items()}
            case tuple():
                return tuple(self._leave(each, (*path, index)) for index, each in enumerate(returned))
        return returned

    def _place(self, key: Hashable, like: Tensor) -> Tensor:
        """The memory under ``key``, allocated for tensors like this one."""
        if key not in self._memory:
            self._memory[key] = torch.empty_like(like, requires_grad=False)
        return self._memory[key]

    def _require_on_device(self, values: Sequence[Any]) -> None:
        """Refuse tensors on the host: a graph reads them when it is recorded, and never again."""
        for tensor in tensors_in(values):
            if tensor.device != self._recorder.device:
                raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is on {tensor.device}")


@dataclass(frozen=True)
class _CopiedArgument:
    """Memory for a copy of the argument at ``position``, or of its item at ``index``."""

    place: Tensor
    position: int
    index: int | None = None

    def fill(self, args: Sequence[Any]) -> None:
        value = args[self.position] if self.index is None else args[self.position][self.index]
        if value.shape != self.place.shape:
            raise InputError(
                f"kernels='cudagraphs' recorded a value of shape {tuple(self.place.shape)}, but this call "
                f"has {tuple(value.shape)}; pass kernels='source'"
            )
        self.place.copy_(value)


@dataclass(frozen=True)
class _Graph:
    """A recorded call: its arguments by name, its ``results``, and the generator of each random operator.

    Tensors in the results of a forward (``is_forward``) are updates of buffers, which outlive the call and
    are copied; those of a backward are gradients, which are accumulated immediately.
    """

    args: Mapping[str, Any]
    moving: Sequence[_CopiedArgument]
    draws: Sequence[tuple[int, torch.Generator]]
    results: Any
    is_forward: bool
    replay: Callable[[], None]

    def __call__(self, args: Sequence[Any]) -> Any:
        passed = dict(zip(self.args, args, strict=True))
        for each in self.moving:
            each.fill(args)
        for operator, generator in self.draws:
            generator.manual_seed(passed["rng"].seed(operator))
        if saved := passed.get("saved"):
            assert all(map(is_, saved, self.args["saved"])), "saved values are in the memory of the slot"
            saved.clear()
        self.replay()
        return self._copied(self.results)

    def _copied(self, results: Any) -> Any:
        match results:
            case list():
                return [*results]
            case dict():
                return {name: each.clone() for name, each in results.items()}
            case tuple():
                return tuple(map(self._copied, results))
            case Tensor():
                return results.clone() if self.is_forward else results
        return results


def _one_by_one(generators: Sequence[torch.Generator]) -> Callable[[int], torch.Generator]:
    """A function that returns the next generator for each random operator of a call."""
    remaining = iter(generators)
    return lambda operator: next(remaining)


def graph_slots(program: Program) -> dict[tuple[int, int], int]:
    """The slot of each stage and microbatch, exclusive from its first compute to its free.

    A stage of 1F1B with two microbatches in flight has two slots::

        F0 F1 B0 free0 F2 B1 free1 F3    ->    0: 0, 1: 1, 2: 0, 3: 1
    """
    slots: dict[tuple[int, int], int] = {}
    in_use: dict[int, set[int]] = defaultdict(set)
    for each in program.instructions:
        key, used = (each.stage, each.microbatch), in_use[each.stage]
        if each.op is Op.FREE:
            used.discard(slots.get(key, -1))
        elif each.op.traits.kind is OpKind.COMPUTE and key not in slots:
            slots[key] = next(number for number in itertools.count() if number not in used)
            used.add(slots[key])
    return slots


def require_gpus(devices: Iterable[torch.device]) -> None:
    """Raise InputError unless all of them can record graphs."""
    if others := [str(device) for device in devices if device.type != "cuda"]:
        raise InputError(
            f"kernels='cudagraphs' needs CUDA devices, but devices has {', '.join(others)}; pass "
            "kernels='source' or 'inductor'"
        )


def require_recordable(plan: Plan, sources: Sequence[str], devices: Mapping[int, torch.device]) -> None:
    """Raise InputError if a plan moves the memory that a graph reads, or has data-dependent operators.

    ``sources`` are the sources of the stages, ``devices`` the devices of this process's ranks.
    """
    problem = _problem(plan, sources, devices)
    if problem is not None:
        raise InputError(f"kernels='cudagraphs' is not possible here: {problem}; pass kernels='source'")


def _problem(plan: Plan, sources: Sequence[str], devices: Mapping[int, torch.device]) -> str | None:
    if plan.sync_spec.stream is not None:
        return "under an asynchronous schedule, weights have several versions, each in its own memory"
    if plan.sync_spec.shard is ShardingLevel.PARAMETERS:
        return "with shard='parameters', parameters are gathered into other memory before each use"
    if any(stage.offloaded for stage in plan.stages):
        return "offloaded values are copied back to other memory"
    for number in (each for each in plan.variables if each.dim is None):
        return f"{number.path} varies between calls, but a graph contains it as a constant; pass a tensor"
    for stage, ranks in enumerate(plan.placement):
        if len({devices[rank] for rank in ranks if rank in devices}) > 1:
            return f"replicas of stage {stage} in one process copy its weights to other GPUs in each step"
    for stage, source in enumerate(sources):
        if found := _DATA_DEPENDENT.search(source):
            return f"stage {stage} has a data-dependent operator ({found.group(1)} in stage_{stage}.py)"
    return None
