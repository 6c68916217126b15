"""Phase functions as CUDA graphs: recorded in a dry run, and replayed where a program calls them.

A graph reads and writes the memory with which it was recorded, whatever lies there when it is replayed. Three
rules make every order of replays right:

* What changes from call to call, such as a message or an input, is first copied to a place of its slot.
* What is saved from phase to phase stays where a graph of the slot has made it, for another one to read.
* What leaves is copied inside of the graph to memory that all slots share, and is taken from there before
  another graph is replayed: gradients are added up, and anything else is copied once more.

So nobody but the stream that computes touches the memory of a graph, and nothing but what is saved is there
from one replay to the next. That is why all graphs of a rank share one pool of memory.

A slot is what a microbatch has from its first compute on a stage until its frame is freed. There are as many
as microbatches in flight, and the program says which microbatch has which.
"""

import contextlib
import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

_BY_VALUES = re.compile(r"\b(check_branch|primitives\.require)\(")
"""What generated code calls where values tell what is computed, or of which size."""


class GraphRecorder(Protocol):
    """Records what a call launches on ``device``."""

    device: torch.device

    def warm_up(self, call: Callable[[], object]) -> None:
        """Make a call whose results nobody needs, as it will be recorded."""

    def record(
        self, call: Callable[[], T], generators: Sequence[torch.Generator]
    ) -> tuple[T, Callable[[], None]]:
        """What the call returns, and what makes it again in the very memory of the tensors in there.

        It draws from ``generators`` alone, each time from the state that they have by then.
        """


class StageGraphs:
    """The functions of a stage as graphs: one for each slot, and each size of its microbatches."""

    def __init__(self, stage: Stage, code: Any, recorder: GraphRecorder) -> None:
        self._stage, self._code, self._recorder = stage, code, recorder
        self._moving = {
            "w": {code.PARAMETERS.index(name) for name in stage.borrowed_parameters},
            "buffers": {code.BUFFERS.index(name) for name in stage.updated_buffers},
        }
        self._memory: dict[Hashable, Tensor] = {}
        self._graphs: dict[Hashable, _Graph] = {}
        self._addresses: list[int] = []
        self._records = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Let what has no graph yet be recorded inside a ``with``."""
        self._records = True
        try:
            yield
        finally:
            self._records = False

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
        return has_moved

    def function(self, name: str, phase: Phase, slot: int, sizes: Callable[[], Hashable]) -> Function:
        """A function for the microbatches of a slot, which have these ``sizes`` when it is called."""
        source: Function = getattr(self._code, name)

        def call(*args: Any) -> Any:
            key = name, slot, sizes()
            if key not in self._graphs:
                self._graphs[key] = self._record(source, phase, key, args)
            return self._graphs[key](args)

        return call

    def precomputed(self, made: Sequence[Any]) -> tuple[Any, ...]:
        """What ``precompute`` has made, in the memory where graphs look for it."""
        return tuple(
            self._place(("precomputed", index), each).copy_(each) if isinstance(each, Tensor) else each
            for index, each in enumerate(made)
        )

    def _record(
        self, source: Function, phase: Phase, key: tuple[str, int, Hashable], args: Sequence[Any]
    ) -> "_Graph":
        name, slot, sizes = key
        what, device = f"{name} of stage {self._stage.index}", self._recorder.device
        if not self._records:
            raise InputError(f"{what} was not recorded for microbatches of {sizes}; take kernels='source'")
        names = tuple(inspect.signature(source).parameters)
        own, moving = self._arguments(names, args, (slot, sizes))
        drawn: list[int] = []

        def call(rng: Callable[[int], torch.Generator]) -> Any:
            passed = [
                rng if isinstance(x, OperatorGenerators) else [*x] if isinstance(x, list) else x for x in own
            ]
            return self._leave(source(*passed), (name, sizes))

        def noting(operator: int) -> torch.Generator:
            drawn.append(operator)
            return torch.Generator(device)

        for each in moving:
            each.fill(args)
        try:
            self._recorder.warm_up(lambda: call(noting))
            generators = [torch.Generator(device) for _ in drawn]
            made, replay = self._recorder.record(lambda: call(_in_turn(generators)), generators)
            self._require_here([*own, made])
        except Exception as error:
            first = error.__context__ or error  # the end of a recording that has failed is an error as well
            raise InputError(
                f"kernels='cudagraphs' cannot record {what}, which has to launch the same for any values: "
                f"{type(first).__name__}: {str(first).strip()}. Take kernels='source'"
            ) from error
        draws = list(zip(drawn, generators, strict=True))
        return _Graph(dict(zip(names, own, strict=True)), moving, draws, made, phase is Phase.FORWARD, replay)

    def _arguments(
        self, names: Sequence[str], args: Sequence[Any], place_of: Hashable
    ) -> tuple[list[Any], list["_CopiedArgument"]]:
        """The arguments of a graph, and which of them are places, to be filled before it is replayed."""
        own, moving = list[Any](), list[_CopiedArgument]()
        for position, (name, value) in enumerate(zip(names, args, strict=True)):
            if isinstance(value, Tensor):
                own.append(self._place((place_of, name), value))
                moving.append(_CopiedArgument(own[-1], position))
            elif isinstance(value, list):
                own.append([*value])
                for index in self._moving.get(name, ()):
                    own[-1][index] = self._place((place_of, name, index), value[index])
                    moving.append(_CopiedArgument(own[-1][index], position, index))
            else:
                own.append(value)
        return own, moving

    def _leave(self, returned: Any, path: tuple[Hashable, ...]) -> Any:
        """Copy what leaves a graph to memory that all slots share. A list is what is saved: it stays."""
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
        """Memory for tensors like this one."""
        if key not in self._memory:
            self._memory[key] = torch.empty_like(like, requires_grad=False)
        return self._memory[key]

    def _require_here(self, values: Sequence[Any]) -> None:
        """A graph reads what is on the host when it is recorded, and never again."""
        for tensor in tensors_in(values):
            if tensor.device != self._recorder.device:
                raise ValueError(f"a tensor of shape {tuple(tensor.shape)} is on {tensor.device}")


@dataclass(frozen=True)
class _CopiedArgument:
    """A place that takes what is passed at ``position``, or at an ``index`` of the list there."""

    place: Tensor
    position: int
    index: int | None = None

    def fill(self, args: Sequence[Any]) -> None:
        value = args[self.position] if self.index is None else args[self.position][self.index]
        if value.shape != self.place.shape:
            raise InputError(
                f"kernels='cudagraphs' has recorded a value of shape {tuple(self.place.shape)}, which is "
                f"{tuple(value.shape)} now; take kernels='source'"
            )
        self.place.copy_(value)


@dataclass(frozen=True)
class _Graph:
    """A recorded call: its arguments by name, what it has ``made``, and which operators draw from what.

    ``is_forward`` tells updates of buffers, which are kept, from gradients, which are added up at once.
    """

    args: Mapping[str, Any]
    moving: Sequence[_CopiedArgument]
    draws: Sequence[tuple[int, torch.Generator]]
    made: Any
    is_forward: bool
    replay: Callable[[], None]

    def __call__(self, args: Sequence[Any]) -> Any:
        given = dict(zip(self.args, args, strict=True))
        for each in self.moving:
            each.fill(args)
        for operator, generator in self.draws:
            generator.manual_seed(given["rng"].seed(operator))
        if saved := given.get("saved"):
            assert all(map(is_, saved, self.args["saved"])), "what is saved is in the memory of the slot"
            saved.clear()
        self.replay()
        return self._taken(self.made)

    def _taken(self, made: Any) -> Any:
        match made:
            case list():
                return [*made]
            case dict():
                return {name: each.clone() for name, each in made.items()}
            case tuple():
                return tuple(map(self._taken, made))
            case Tensor():
                return made.clone() if self.is_forward else made
        return made


def _in_turn(generators: Sequence[torch.Generator]) -> Callable[[int], torch.Generator]:
    """For each draw of a call its generator."""
    left = iter(generators)
    return lambda operator: next(left)


def graph_slots(program: Program) -> dict[tuple[int, int], int]:
    """For each stage and microbatch of a step a slot, which no other has from its first compute to its free.

    A stage of 1F1B with two microbatches in flight has two::

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
            f"kernels='cudagraphs' records what CUDA devices do, but devices has {', '.join(others)}; take "
            "kernels='source' or 'inductor' there"
        )


def require_recordable(plan: Plan, sources: Sequence[str], devices: Mapping[int, torch.device]) -> None:
    """Raise InputError where a plan moves the memory that a graph reads, or values tell what is computed.

    ``sources`` are the code of the stages, and ``devices`` those of the ranks of this process.
    """
    problem = _problem(plan, sources, devices)
    if problem is not None:
        raise InputError(f"kernels='cudagraphs' cannot be where {problem}; take kernels='source'")


def _problem(plan: Plan, sources: Sequence[str], devices: Mapping[int, torch.device]) -> str | None:
    if plan.sync_spec.stream is not None:
        return "there is no flush, since weights have several versions in memory of their own"
    if plan.sync_spec.shard is ShardingLevel.PARAMETERS:
        return "parameters are gathered for use (shard='parameters'), each time into other memory"
    if any(stage.offloaded for stage in plan.stages):
        return "saved values wait in host memory (offload), and come back to other memory"
    for number in (each for each in plan.variables if each.dim is None):
        return f"{number.path} is another number in each call, and a graph has numbers in it; pass a tensor"
    for stage, ranks in enumerate(plan.placement):
        if len({devices[rank] for rank in ranks if rank in devices}) > 1:
            return f"replicas of stage {stage} in one process copy its weights to other GPUs for each step"
    for stage, source in enumerate(sources):
        if found := _BY_VALUES.search(source):
            return f"stage {stage} computes what values tell ({found.group(1)} in stage_{stage}.py)"
    return None
