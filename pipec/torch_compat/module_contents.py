"""Reads the state of all modules and tensors in few calls: thousands of attributes before each step."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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


def module_hooks(module: torch.nn.Module) -> tuple[int, ...]:
    """The numbers that torch gave the forward and backward hooks of a module."""
    hooks: tuple[dict[int, Any], ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return tuple([number for registry in hooks for number in registry]) if any(hooks) else ()


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


def _any_in(collections: Iterable[Iterable[object]]) -> bool:
    return any(itertools.chain.from_iterable(collections))


def device_and_dtype(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """What these arguments of ``nn.Module.to`` ask for."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype
