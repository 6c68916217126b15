"""Lets inductor compile the functions of a rank's stages, again when a size of their inputs changes first.

A function is traced with a frame of fake tensors; what it reads and pops does not depend on values. The first
call has its own sizes. Sizes and whole numbers that differ in a later one are symbols from then on. The
compiled code takes the tensors out of a list, so that a saved value is freed when its last reader has run, as
in the source. Random operators take their seed as a tensor and draw the same numbers as the source. Other
values may differ from the source's in their last bits, because sums are computed in another order.
"""

import functools
import inspect
import math
import re
import threading
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pipec.console import delayed_status, warn
from pipec.ir import MMAP_THRESHOLD_BYTES
from pipec.runtime.memory.block_cache import empty_cached
from pipec.runtime.random_seeds import OperatorGenerators
from pipec.runtime.stages.bound_stage import Frame
from pipec.torch_compat import pytree
from pipec.torch_compat.run_time import inductor_code

Code = Callable[[list[Any]], Sequence[Any]]
"""Takes its inputs out of a list, which is empty from then on, and frees each when nothing reads it later."""

Fits = Callable[[Sequence[Any]], bool]
"""Whether code is right for inputs of these sizes and strides, which have the types that it was made for."""

MAX_COMPILED = 32
"""How often a function is compiled. With further sizes of its inputs its source runs."""

_one_at_a_time = threading.Lock()
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

    The result has the structure ``spec``. Its leaves are ``constants``, but for each ``_COMPUTED`` the next
    output. The code is for calls with these ``sizes``, but for those at ``variables``, whose ``inputs`` are
    leaves that it ``fits``.
    """

    code: Code
    taken: Sequence[int]
    spec: Any
    constants: Sequence[Any]
    sizes: Sequence[int]
    variables: Collection[int]
    inputs: Sequence[int]
    fits: Fits

    def __call__(self, leaves: list[Any]) -> Any:
        inputs = [leaves[place] for place in self.taken]
        leaves.clear()
        made = iter(self.code(inputs))
        returned = [next(made) if each is _COMPUTED else each for each in self.constants]
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
            with delayed_status(f"compiling {self._name}"), _one_at_a_time:
                code, taken, names, fits = inductor_code(
                    function,
                    [leaves[place] for place in places],
                    dims,
                    {torch.ops.aten.addmm.default: split_bias_addition},
                )
            reuse_memory(names)
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
        constants = [_COMPUTED if isinstance(each, _COMPUTED) else each for each in made]
        read = [places[number] for number in taken]
        return _Program(code, read, spec, constants, _sizes(leaves), variables, places, fits)


_COMPUTED = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
"""What code returns of a function's results, and what stands for it; others are constants."""


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


def split_bias_addition(
    bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """``addmm`` as a product and an addition, so that inductor fuses the addition with its readers.

    On CPUs ``addmm`` first copies the bias to each row, and then adds the product. This took 0.89 of the time
    of a GPT's forward at width 64. It is not done for 16-bit types, where the product would be rounded before
    the sum, nor on GPUs, whose products add biases. The view keeps inductor from making one ``addmm`` again.
    """
    is_split = bias.device.type == "cpu" and bias.dtype in (torch.float32, torch.float64)
    if not is_split or beta != 1 or alpha != 1:
        made: Tensor = NotImplemented
        return made
    return (left.mm(right).unsqueeze(0) + bias).squeeze(0)


def reuse_memory(names: dict[str, Any]) -> None:
    """Make generated code allocate large values from freed memory of earlier ones.

    It allocates uninitialised memory by one of the names of its module::

        buf0 = empty_strided_cpu((256, 32768), (32768, 1), torch.float32)
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
    """
    empty = names.get("empty_strided_cpu")
    if isinstance(empty, types.BuiltinFunctionType):
        names["empty_strided_cpu"] = functools.partial(_empty, empty)


def _empty(
    empty: Callable[..., Tensor], sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """``empty`` for small tensors; large ones come from the block cache."""
    if math.prod(sizes) * dtype.itemsize < MMAP_THRESHOLD_BYTES:
        return empty(sizes, strides, dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return empty_cached([extent], dtype, torch.device("cpu")).as_strided(sizes, strides)
