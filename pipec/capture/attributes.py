"""The values that a module's code could read: attributes, and the closures of its functions.

They are compared where a front end other than Dynamo captured the model and reports no guards.
"""

import contextvars
import enum
import functools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipec.torch_compat.compared_values import ARRAYS, by_name, comparable

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
"""Sources of random numbers that are not torch's."""

_LEAVES = (
    *(int, float, complex, str, bytes, type(None), enum.Enum, set, frozenset),
    *(torch.dtype, torch.device, Tensor),
    *ARRAYS,
    *_GENERATORS,
)

_FOLLOWED = (
    *(*_LEAVES, Mapping, list, tuple, deque),
    *(functools.partial, types.FunctionType, types.MethodType, contextvars.ContextVar),
)
"""What is looked at wherever code names it."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

_DEPTH, _MOST_ITEMS = 3, 1000
"""So many objects may lie around a value that is found, and so many items may be in each of them."""


def readable_values(traced: nn.Module) -> dict[str, Any]:
    """The plain values, functions and tensors below the modules, by name, such as ``model.drop.p``."""
    found = _reachable(traced)
    return by_name((path, comparable(x)) for path, x in found if not isinstance(x, _GENERATORS))


def non_torch_generators(traced: nn.Module) -> dict[str, Any]:
    """The generators below the modules that are not torch's, by name."""
    return by_name((path, value) for path, value in _reachable(traced) if isinstance(value, _GENERATORS))


def _reachable(traced: nn.Module) -> Iterator[tuple[str, Any]]:
    """The values at most ``_DEPTH`` steps below a module, and their names.

    Functions that a module calls without having them as methods or attributes are not searched.
    """
    visited = dict[int, tuple[int, Any]]()
    return (
        found
        for path, module in traced.named_modules()
        for name, value in _parts(module)
        if name not in _OF_EVERY_MODULE
        for found in _values(f"{path}.{name}".removeprefix("."), value, _DEPTH, visited)
    )


def _values(
    path: str, value: Any, depth: int, visited: dict[int, tuple[int, Any]]
) -> Iterator[tuple[str, Any]]:
    """The values at most ``depth`` steps below one, unless it was visited with as many steps left."""
    if isinstance(value, _LEAVES):
        yield path, value
    elif depth and not isinstance(value, nn.Module | type | types.ModuleType):
        if visited.get(id(value), (0, None))[0] >= depth:
            return
        visited[id(value)] = depth, value
        if isinstance(value, types.FunctionType):
            yield path, value
        for name, part in _parts(value):
            yield from _values(f"{path}.{name}", part, depth - 1, visited)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case Mapping() | list() | tuple() | deque() if len(value) > _MOST_ITEMS:
            return
        case Mapping():
            yield from ((str(key), value[key]) for key in list(value))
        case list() | tuple() | deque():
            yield from ((str(index), part) for index, part in enumerate(value))
        case functools.partial():
            yield from _parts([value.func, *value.args, value.keywords])
        case types.MethodType():
            yield from (("self", value.__self__), ("function", value.__func__))
        case types.FunctionType():
            yield from _read_by(value)
        case contextvars.ContextVar():
            yield "get()", value.get(None)
        case _:
            yield from (*_methods(type(value)), *getattr(value, "__dict__", {}).items())


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """The functions of a class and of those it inherits from, except torch's."""
    own = [base for base in kind.__mro__ if not base.__module__.startswith("torch.")]
    found = ((name, getattr(x, "__func__", x)) for base in own for name, x in vars(base).items())
    return ((name, x) for name, x in found if isinstance(x, types.FunctionType))


def _read_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The closure, the defaults and the globals of a function that is not torch's.

    Of objects, classes and modules among the globals, the attributes that the code names count too.
    """
    if (function.__module__ or "").startswith("torch."):
        return
    code, known = function.__code__, function.__globals__
    yield from (("defaults", function.__defaults__), ("keywords", function.__kwdefaults__))
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # of a variable that has no value yet
            continue
    words = dict.fromkeys([*code.co_names, *(x for x in code.co_consts if isinstance(x, str))])
    for name in words:
        if name not in known:
            continue
        if isinstance(known[name], _FOLLOWED):
            yield name, known[name]
        else:
            if isinstance(known[name], type):
                yield from ((f"{name}.{x}", function) for x, function in _methods(known[name]))
            held = getattr(known[name], "__dict__", {})
            named = ((x, held[x]) for x in words if x in held)
            yield from ((f"{name}.{x}", part) for x, part in named if isinstance(part, _FOLLOWED))
