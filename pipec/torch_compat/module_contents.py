"""Reads the state of all modules and tensors in few calls: thousands of attributes before each step."""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module
from torch.utils.hooks import RemovableHandle

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
    with torch.DisableTorchFunctionSubclass():  # a tenth of the time, for tensors of a subclass
        hooked = [*map(has_gradient_hook, tensors)] if _any_in(map(_HOOKS, tensors)) else []
        return [*map(_TENSOR_FIELDS, tensors)], hooked


def _registry(register: Callable[..., RemovableHandle]) -> Any:
    """Where torch keeps the hooks that a function registers. No hook stays there."""
    handle = register(lambda *call: None)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks


_FORWARD_HOOKS = _registry(module.register_module_forward_hook)
_FORWARD_PRE_HOOKS = _registry(module.register_module_forward_pre_hook)
_BACKWARD_PRE_HOOKS = _registry(module.register_module_full_backward_pre_hook)


def num_global_hooks() -> int:
    """The number of the hooks that torch calls for every module."""
    backward = len(module._global_backward_hooks) + len(_BACKWARD_PRE_HOOKS)
    return len(_FORWARD_HOOKS) + len(_FORWARD_PRE_HOOKS) + backward


def has_global_forward_hooks() -> bool:
    """Whether torch calls hooks around the forward of every module."""
    return bool(_FORWARD_HOOKS or _FORWARD_PRE_HOOKS)


def has_forward_pre_hooks(owner: torch.nn.Module) -> bool:
    """Whether hooks may change the arguments of a module."""
    return bool(owner._forward_pre_hooks)


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
