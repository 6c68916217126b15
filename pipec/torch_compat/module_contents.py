"""Reads the state of all modules and tensors in few calls: thousands of attributes before each step."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

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


def module_contents(modules: Sequence[torch.nn.Module]) -> tuple[list[Any], list[Any]]:
    """The current contents of modules: what is compared by value, and the objects compared by identity.

    The values are modes, hooks, classes, and the numbers and names of children, parameters and buffers. The
    objects are these children, parameters and buffers; some may be None.
    """
    training, children, parameters, buffers, *hooks = zip(*map(_MODULE_FIELDS, modules), strict=True)
    registries = (*children, *parameters, *buffers)
    filled = [*filter(None, registries)]
    values = [
        training,
        [*map(_numbers, zip(*hooks, strict=True))] if _any_in(hooks) else [],
        [*map(type, modules)],
        [*map(len, registries)],
        [*itertools.chain.from_iterable(filled)],
    ]
    return values, [*itertools.chain.from_iterable(map(_values, filled))]


def tensor_contents(tensors: Sequence[Tensor]) -> tuple[list[Any], list[bool]]:
    """The shape, dtype and ``requires_grad`` of tensors; if any has a gradient hook, also which have one."""
    with torch._C.DisableTorchFunctionSubclass():  # a tenth of the time, for tensors of a subclass
        hooked = [*map(has_gradient_hook, tensors)] if _any_in(map(_HOOKS, tensors)) else []
        return [*map(_TENSOR_FIELDS, tensors)], hooked


def global_hooks() -> list[int]:
    """The numbers of the hooks that torch calls for every module."""
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return [number for kind in kinds for number in getattr(torch.nn.modules.module, f"_global_{kind}")]


def has_global_forward_hooks() -> bool:
    """Whether torch calls hooks around the forward of every module."""
    registries = torch.nn.modules.module
    return bool(registries._global_forward_hooks or registries._global_forward_pre_hooks)


def has_gradient_hook(tensor: torch.Tensor) -> bool:
    """Whether the leaf ``tensor`` has a hook that autograd calls with its gradient."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def num_changes(tensor: torch.Tensor) -> int:
    """How often the tensor has been changed in place."""
    return tensor._version


def _numbers(hooks: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """The numbers that torch gave the forward and backward hooks of a module."""
    return tuple(itertools.chain.from_iterable(hooks))


def _any_in(collections: Iterable[Iterable[object]]) -> bool:
    return any(itertools.chain.from_iterable(collections))


def device_and_dtype(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """What these arguments of ``nn.Module.to`` ask for."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype
