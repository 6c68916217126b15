"""Lets inductor compile the functions of a rank's stages, for each size of their inputs.

A function is traced with a frame of fake tensors; what it reads and pops does not depend on values. The
compiled code takes the tensors out of a list, so that a saved value is freed when its last reader has run, as
in the source. Random operators take their seed as a tensor and draw the same numbers as the source. Other
values may differ from the source's in their last bits, because sums are computed in another order.
"""

import inspect
import re
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from pipec.console import delayed_status, warn
from pipec.errors import InputError
from pipec.ir import Plan
from pipec.runtime.random_seeds import OperatorGenerators
from pipec.runtime.stages.bound_stage import Frame
from pipec.runtime.stages.inductor import compile_function
from pipec.torch_compat import pytree

MAX_SIZES = 32
"""Sizes of its inputs for which a function is compiled. With further ones its source runs."""

_tensor_options = attrgetter("dtype", "device", "shape")


def require_source(kernels: str, plan: Plan | None = None) -> None:
    """Raise InputError if functions that accumulate gradients in place would be compiled.

    Without a ``plan``, functions are assumed to accumulate.
    """
    adds = plan is None or any(stage.cost.memory.accumulated_in_place for stage in plan.stages)
    if adds and kernels != "source":
        raise InputError(
            "with fused_gradients, stage functions accumulate gradients in place, but "
            f"kernels={kernels!r} compiles functions that return them; pass kernels='source', or compile "
            "without fused_gradients"
        )


def compile_functions(code: types.ModuleType, functions: Iterable[str]) -> None:
    """Let inductor compile these functions of a stage, where it has them."""
    for name in functions:
        if function := getattr(code, name, None):
            setattr(code, name, CompiledFunction(function, f"{name} of {code.__name__}"))


@dataclass(frozen=True)
class _Program:
    """Compiled code, the leaves of a frame that it takes, and the function's result.

    The result has the structure ``spec``. Its leaves are ``constants``, or in place of a number of an output,
    the output.
    """

    code: Callable[[list[Any]], Sequence[Tensor]]
    taken: Sequence[int]
    spec: Any
    outputs: Sequence[int | None]
    constants: Sequence[Any]

    def __call__(self, leaves: list[Any]) -> Any:
        inputs = [leaves[place] for place in self.taken]
        leaves.clear()
        made = self.code(inputs)
        returned = [
            constant if number is None else made[number]
            for number, constant in zip(self.outputs, self.constants, strict=True)
        ]
        return pytree.tree_unflatten(returned, self.spec)


class CompiledFunction:
    """A phase function under inductor. If it cannot be compiled, its source runs, and a warning says why."""

    def __init__(self, function: Callable[[Frame], Any], name: str) -> None:
        self._source, self._name = function, name
        source = inspect.getsource(function)
        self._read = re.findall(r'frame\["(\w+)"\]', source)
        self._popped = re.findall(r'frame\.pop\("(\w+)"\)', source)
        self._draws = [int(number) for number in re.findall(r"\brng\((\d+)\)", source)]
        self._programs: dict[Hashable, _Program | None] = {}
        self._can_compile = True

    def __call__(self, frame: Frame) -> Any:
        leaves, structure = self._leaves(frame)
        key = _key(leaves, structure)
        if key not in self._programs and self._can_compile:
            self._can_compile = len(self._programs) + 1 < MAX_SIZES
            self._programs[key] = self._compiled(frame)
        program = self._programs.get(key)
        if program is None:
            return self._source(frame)
        for name in self._popped:
            del frame[name]
        return program(leaves)

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

    def _compiled(self, frame: Frame) -> _Program | None:
        leaves, _ = self._leaves(frame)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        results: list[Any] = []

        def function(*tensors: Tensor) -> list[Tensor]:
            given = dict(zip(places, tensors, strict=True))
            own = [given.get(place, leaf) for place, leaf in enumerate(leaves)]
            made, spec = pytree.tree_flatten(self._source(self._frame(frame, own)))
            results[:] = made, spec
            return [each for each in made if isinstance(each, Tensor)]

        try:
            with delayed_status(f"compiling {self._name}"):
                code, taken = compile_function(function, [leaves[place] for place in places])
        except Exception as error:  # inductor raises many kinds
            if _is_out_of_memory(error):
                raise
            self._can_compile = False
            first, second, *_ = [line.strip() for line in str(error).strip().splitlines()] + ["", ""]
            warn(
                f"inductor cannot compile {self._name}, which runs as its source: "
                f"{type(error).__name__}: {first} {second}".rstrip()
            )
            return None
        made, spec = results
        numbers = iter(range(len(made)))
        outputs = [next(numbers) if isinstance(each, Tensor) else None for each in made]
        constants = [None if isinstance(each, Tensor) else each for each in made]
        return _Program(code, [places[number] for number in taken], spec, outputs, constants)


def _key(leaves: Sequence[Any], structure: tuple[int, ...]) -> Hashable:
    """Calls with equal keys run the same code: they differ in the elements of tensors alone."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    others = (leaf for leaf in leaves if not isinstance(leaf, Tensor))
    state = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    return (
        structure,
        state,
        *map(_tensor_options, tensors),
        *map(Tensor.stride, tensors),
        *others,
    )


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that has caused it, says that memory was short."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
