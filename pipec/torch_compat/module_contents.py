"""Reads the state of all modules and tensors in few calls: thousands of attributes before each step."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipec.torch_compat.differentiation import has_gradient_hook
from pipec.torch_compat.module_state import module_hooks

_MODULE_FIELDS = operator.attrgetter(
    "training",
    "_modules",
    "_parameters",
    "_buffers",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_TENSOR_FIELDS = operator.attrgetter("shape", "dtype", "requires_grad")
_HOOKS = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_values = operator.methodcaller("values")


class ModuleContents(NamedTuple):
    """The children, parameters, buffers and hooks of some modules, in order.

    ``sizes`` has the number of children of each module, then the numbers of parameters and buffers of each.
    ``names`` has the names of all these. ``children`` and ``tensors`` may contain None.
    """

    training: tuple[bool, ...]
    hooks: Sequence[tuple[int, ...]]
    sizes: list[int]
    names: list[str]
    children: list[torch.nn.Module | None]
    tensors: list[Tensor | None]

    @property
    def plain(self) -> tuple[Any, ...]:
        """The fields that are compared by value."""
        return self[:4]


def module_contents(modules: Sequence[torch.nn.Module]) -> ModuleContents:
    """The current contents of modules."""
    training, children, parameters, buffers, *hooks = zip(*map(_MODULE_FIELDS, modules), strict=True)
    tensors = [*itertools.chain.from_iterable(zip(parameters, buffers, strict=True))]
    registries = [*children, *tensors]
    return ModuleContents(
        training,
        [*map(module_hooks, modules)] if _any_in(hooks) else [()] * len(modules),
        [*map(len, registries)],
        [*itertools.chain.from_iterable(filter(None, registries))],
        [*itertools.chain.from_iterable(map(_values, filter(None, children)))],
        [*itertools.chain.from_iterable(map(_values, filter(None, tensors)))],
    )


class TensorMetadata(NamedTuple):
    """The shape, dtype and ``requires_grad`` of each of some tensors, and whether it has a gradient hook."""

    plain: list[tuple[torch.Size, torch.dtype, bool]]
    hooked: Sequence[bool]


def tensor_metadata(tensors: Sequence[Tensor]) -> TensorMetadata:
    """The current metadata of tensors."""
    with torch._C.DisableTorchFunctionSubclass():  # a tenth of the time, for tensors of a subclass
        are_hooked = _any_in(map(_HOOKS, tensors))
        hooked = [*map(has_gradient_hook, tensors)] if are_hooked else [False] * len(tensors)
        return TensorMetadata([*map(_TENSOR_FIELDS, tensors)], hooked)


def _any_in(collections: Iterable[Iterable[object]]) -> bool:
    return any(itertools.chain.from_iterable(collections))
