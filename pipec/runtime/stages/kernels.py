"""Lets inductor compile the functions of a rank's stages, again when a size of their inputs changes first.

A function is traced with a frame of fake tensors; what it reads and pops does not depend on values. The first
call has its own sizes. Sizes and whole numbers that differ in a later one are symbols from then on. The
compiled code takes the tensors out of a list, so that a saved value is freed when its last reader has run, as
in the source. Random operators take their seed as a tensor and draw the same numbers as the source. Other
values may differ from the source's in their last bits, because sums are computed in another order.
"""

import inspect
import re
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pipec.console import delayed_status, warn
from pipec.runtime.random_seeds import OperatorGenerators
from pipec.runtime.stages.bound_stage import Frame
from pipec.runtime.stages.inductor import Fits, compile_function
from pipec.torch_compat import pytree

MAX_COMPILED = 32
"""How often a function is compiled. With further sizes of its inputs its source runs."""

_tensor_options = attrgetter("dtype", "device", "shape")
_tensor_kind = attrgetter("dtype", "device", "ndim")


def compile_functions(code: types.ModuleType, functions: Iterable[str]) -> None:
    """Let inductor compile these functions of a stage, where it has them."""
    for name in functions:
        if function := getattr(code, name, None):
            setattr(code, name, CompiledFunction(function, f"{name} of {code.__name__}"))


@dataclass(frozen=True)
class _Program:
    """Compiled code, the leaves of a frame that it takes, and the function's result.

    The result has the structure ``spec``. Its leaves are ``constants``, or in place of a number of an output,
    the output. The code is for calls with these ``sizes``, but for those at ``variables``, whose ``inputs``
    are leaves that it ``fits``.
    """

    code: Callable[[list[Any]], Sequence[Any]]
    taken: Sequence[int]
    spec: Any
    outputs: Sequence[int | None]
    constants: Sequence[Any]
    sizes: Sequence[int]
    variables: Collection[int]
    inputs: Sequence[int]
    fits: Fits

    def __call__(self, leaves: list[Any]) -> Any:
        inputs = [leaves[place] for place in self.taken]
        leaves.clear()
        made = self.code(inputs)
        returned = [
            constant if number is None else made[number]
            for number, constant in zip(self.outputs, self.constants, strict=True)
        ]
        return pytree.tree_unflatten(returned, self.spec)

    def is_for(self, sizes: Sequence[int], leaves: Sequence[Any]) -> bool:
        """Whether a call of the same kind may run the code."""
        changed = {site for site, size in enumerate(sizes) if size != self.sizes[site]}
        return changed <= {*self.variables} and self.fits([leaves[place] for place in self.inputs])


@dataclass
class _Kind:
    """Calls that differ in sizes and whole numbers alone: those of the first, and which changed since."""

    first: Sequence[int]
    varying: set[int] = field(default_factory=set)
    programs: list[_Program] = field(default_factory=list)


class CompiledFunction:
    """A phase function under inductor. If it cannot be compiled, its source runs, and a warning says why."""

    def __init__(self, function: Callable[[Frame], Any], name: str) -> None:
        self._source, self._name = function, name
        source = inspect.getsource(function)
        self._read = re.findall(r'frame\["(\w+)"\]', source)
        self._popped = re.findall(r'frame\.pop\("(\w+)"\)', source)
        self._draws = [int(number) for number in re.findall(r"\brng\((\d+)\)", source)]
        self._found: dict[Hashable, _Program | None] = {}
        self._kinds: dict[Hashable, _Kind] = {}
        self._num_compiled = 0
        self._can_compile = self._can_vary = True

    def __call__(self, frame: Frame) -> Any:
        leaves, structure = self._leaves(frame)
        key = _key(leaves, structure)
        if key not in self._found:
            self._found[key] = self._program(frame, leaves, structure)
        program = self._found[key]
        if program is None:
            return self._source(frame)
        for name in self._popped:
            del frame[name]
        return program(leaves)

    def _program(self, frame: Frame, leaves: Sequence[Any], structure: tuple[int, ...]) -> _Program | None:
        """What runs calls of these sizes; None if it is the source."""
        sizes = _sizes(leaves)
        kind = self._kinds.setdefault(_kind(leaves, structure), _Kind(sizes))
        for known in kind.programs:
            if known.is_for(sizes, leaves):
                return known
        if not self._can_compile or self._num_compiled == MAX_COMPILED:
            return None
        kind.varying |= {site for site, size in enumerate(sizes) if size != kind.first[site]}
        variables = {site for site in kind.varying if sizes[site] > 1} if self._can_vary else set[int]()
        program = self._compiled(frame, leaves, variables)
        if program is not None:
            kind.programs.append(program)
            self._num_compiled += 1
        return program

    def _leaves(self, frame: Frame) -> tuple[list[Any], tuple[int, ...]]:
        """The values that the function reads: seeds in place of generators, and the items of sequences."""
        leaves, structure = list[Any](), list[int]()
        for name in (*self._read, *self._popped):
            value = frame[name]
            if isinstance(value, OperatorGenerators):
                value = [*value.seeds(self._draws).values()]
            if isinstance(value, list | tuple):
                leaves += value
                structure.append(len(value))
            else:
                leaves.append(value)
        return leaves, tuple(structure)

    def _frame(self, frame: Frame, leaves: Sequence[Any]) -> Frame:
        """A frame like this one with other leaves."""
        made, left = Frame(), iter(leaves)
        for name in (*self._read, *self._popped):
            value = frame[name]
            if isinstance(value, OperatorGenerators):
                seeds = {draw: next(left) for draw in value.seeds(self._draws)}
                made[name] = seeds.__getitem__
            elif isinstance(value, list | tuple):
                made[name] = [next(left) for _ in value]
            else:
                made[name] = next(left)
        return made

    def _compiled(self, frame: Frame, leaves: Sequence[Any], variables: Collection[int]) -> _Program | None:
        """The code for these leaves, whose sizes at ``variables`` are symbols. None if there is none."""
        places, dims, site = list[int](), dict[int, list[int]](), 0
        for place, leaf in enumerate(leaves):
            own = _sizes([leaf])
            varying = [number for number in range(len(own)) if site + number in variables]
            if isinstance(leaf, Tensor):
                dims[len(places)] = varying
            if isinstance(leaf, Tensor) or varying:
                places.append(place)
            site += len(own)
        results: list[Any] = []

        def function(*inputs: Any) -> list[Any]:
            given = dict(zip(places, inputs, strict=True))
            own = [given.get(place, leaf) for place, leaf in enumerate(leaves)]
            made, spec = pytree.tree_flatten(self._source(self._frame(frame, own)))
            results[:] = made, spec
            return [each for each in made if isinstance(each, _COMPUTED)]

        try:
            with delayed_status(f"compiling {self._name}"):
                code, taken, fits = compile_function(function, [leaves[place] for place in places], dims)
        except Exception as error:  # inductor raises many kinds
            if _is_out_of_memory(error):
                raise
            if variables:
                self._can_vary = False
                return self._compiled(frame, leaves, ())
            self._can_compile = False
            first, second, *_ = [line.strip() for line in str(error).strip().splitlines()] + ["", ""]
            warn(
                f"inductor cannot compile {self._name}, which runs as its source: "
                f"{type(error).__name__}: {first} {second}".rstrip()
            )
            return None
        made, spec = results
        numbers = iter(range(len(made)))
        outputs = [next(numbers) if isinstance(each, _COMPUTED) else None for each in made]
        constants = [None if isinstance(each, _COMPUTED) else each for each in made]
        read = [places[number] for number in taken]
        return _Program(code, read, spec, outputs, constants, _sizes(leaves), variables, places, fits)


_COMPUTED = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
"""What code returns of a function's results; others are constants."""


def _sizes(leaves: Iterable[Any]) -> list[int]:
    """The sizes of tensors, and the whole numbers: what may change from call to call."""
    return [
        size
        for leaf in leaves
        for size in (leaf.shape if isinstance(leaf, Tensor) else (leaf,))
        if type(size) is int
    ]


def _kind(leaves: Sequence[Any], structure: tuple[int, ...]) -> Hashable:
    """Calls with equal kinds differ in sizes, strides and whole numbers, and in the elements of tensors."""
    kinds = [
        _tensor_kind(leaf) if isinstance(leaf, Tensor) else int if type(leaf) is int else leaf
        for leaf in leaves
    ]
    return structure, _state(), *kinds


def _key(leaves: Sequence[Any], structure: tuple[int, ...]) -> Hashable:
    """Calls with equal keys run the same code: they differ in the elements of tensors alone."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    others = (leaf for leaf in leaves if not isinstance(leaf, Tensor))
    return (
        structure,
        _state(),
        *map(_tensor_options, tensors),
        *map(Tensor.stride, tensors),
        *others,
    )


def _state() -> Hashable:
    """The settings of torch that compiled code depends on."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that has caused it, says that memory was short."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
