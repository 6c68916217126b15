"""Caches checked calls, for later calls that differ in the values of tensors alone."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from pipec.capture.model_call import ModelCall
from pipec.ir.batch_split import repeated_tensors
from pipec.torch_compat.foreign_classes import attributes, marked_dimensions
from pipec.torch_compat.module_contents import has_forward_pre_hooks

CALL_CACHE_SIZE = 8
"""How many keys are cached, those used last."""


@dataclass(frozen=True)
class CallKey:
    """Everything that decides how a call is split and whether it is refused.

    ``structure`` has the names of keyword arguments in order, the type, the shape and the strides of each
    tensor, plain values, and which tensors are passed again. ``binding`` is the signature of the model's
    ``forward``, and ``request`` what the pipeline makes of the call.
    """

    structure: tuple[Any, ...]
    binding: tuple[Any, ...]
    request: object

    @classmethod
    def of(
        cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, request: object
    ) -> "tuple[CallKey | None, list[Any]]":
        """The key of these arguments, and their leaves; None if a part cannot be compared."""
        leaves: list[Any] = []
        try:
            structure = *kwargs, *_structure((args, dict(sorted(kwargs.items())), target), leaves)
            structure = *structure, repeated_tensors(leaves)
            binding = () if has_forward_pre_hooks(model) else _binding(model.forward)
        except _UnknownError:
            return None, leaves
        return cls(structure, binding, request), leaves


class CallCache:
    """The checked calls of one model."""

    def __init__(self) -> None:
        self._known: list[tuple[CallKey, ModelCall]] = []

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()

    def get(self, key: CallKey) -> ModelCall | None:
        """A call of this key, without its values."""
        for number, (known, call) in enumerate(self._known):
            if known == key:
                self._known.insert(0, self._known.pop(number))
                return call
        return None

    def put(self, key: CallKey, call: ModelCall) -> None:
        """Remember a checked call."""
        self._known = [(key, call.without_arguments()), *self._known[: CALL_CACHE_SIZE - 1]]


class _UnknownError(Exception):
    """A part of a call cannot be compared."""


def _structure(value: Any, leaves: list[Any]) -> tuple[Any, ...]:
    """The structure of a value; its leaves are appended to ``leaves``."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, *[_structure(each, leaves) for each in value]
    if kind is dict:
        return kind, *value, *[_structure(each, leaves) for each in value.values()]
    leaves.append(value)
    if kind in _PLAIN:
        return kind, value
    if kind is not Tensor or value.layout is not torch.strided or value.is_nested:
        raise _UnknownError
    if value.is_conj() or value.is_neg() or (vars(value) and attributes(value)):
        raise _UnknownError
    return value.dtype, value.shape, value.stride(), marked_dimensions(value) if vars(value) else None


_PLAIN = (int, float, bool, str, type(None))


def _binding(function: Any) -> tuple[Any, ...]:
    """The parts of a function, and of those it wraps, that decide its signature."""
    found: list[Any] = [inspect.ismethod(function)]
    while function is not None:
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if not isinstance(code, CodeType) or hasattr(function, "__signature__"):
            raise _UnknownError
        found += [code, len(function.__defaults__ or ()), tuple(function.__kwdefaults__ or ())]
        function = getattr(function, "__wrapped__", None)
    return tuple(found)
