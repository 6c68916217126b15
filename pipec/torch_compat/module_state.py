"""What tracing does to a module, undone; and a call of the module without tracing."""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""What operators raise on fake tensors that would work on real ones."""


NEEDS_MEMORY = ("not allocated yet", "access data pointer", "access storage", "for tensor subclasses")
"""What kernels and ``Tensor.numpy`` say where they find that a tensor has no memory."""


LOGGERS = (
    "torch._dynamo",
    "torch._export",
    "torch._functorch",
    "torch._guards",
    "torch._subclasses",
    "torch.export",
    "torch.fx",
)


@contextlib.contextmanager
def quiet_logging() -> Iterator[None]:
    """Keep torch's advice about tracing off the terminal, except from loggers that TORCH_LOGS turned up."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            if logger.level not in (logging.DEBUG, logging.INFO):
                logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Let operators compute in the types of what they are given."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextlib.contextmanager
def restore_module(module: torch.nn.Module) -> Iterator[None]:
    """Put back every attribute, parameter, buffer and hook that tracing replaced, such as by a fake tensor.

    Differentiation swaps the tensors of a module for its own, and does not undo that for a module that is
    registered under two names. Dynamo leaves marks on the tensors themselves.
    """
    containers = _containers(module)
    containers += [vars(tensor) for tensor in (*module.parameters(), *module.buffers())]
    before = [copy.copy(container) for container in containers]
    try:
        yield
    finally:
        for container, kept in zip(containers, before, strict=True):
            _restore(container, kept)


Container = dict[Any, Any] | list[Any] | set[Any]


def _containers(module: torch.nn.Module) -> list[Container]:
    """The attributes of the module and of those below it, and the dicts, lists and sets among them."""
    found: list[Container] = []
    for each in module.modules():
        found += [each.__dict__, *(x for x in each.__dict__.values() if isinstance(x, dict | list | set))]
    return found


def _restore(container: Container, kept: Container) -> None:
    """Put back what has changed. What never does may be a dict of its own kind that refuses to."""
    if _contents(container) == _contents(kept):
        return
    if isinstance(container, list):
        container[:] = kept
    else:
        container.clear()
        container.update(kept)


def _contents(container: Container) -> list[Any]:
    """What tells whether a container has changed: its keys, and which objects it holds."""
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return [id(value) for value in container]


def _registries(module: torch.nn.Module) -> list[dict[str, Any]]:
    """The dicts in which the module and those below it keep their tensors and attributes."""
    return [r for m in module.modules() for r in (m.__dict__, m._parameters, m._buffers)]


def replace_with_fake_tensors(module: torch.nn.Module, device: torch.device) -> dict[int, torch.Tensor]:
    """Replace parameters and buffers by fake ones on ``device``, without memory, unless all is on the CPU.

    Operators differ between kinds of devices, a model may be larger than the memory of one, and its tensors
    may be on several. On meta, torch takes attention apart; and a composite operator that has a kernel for
    meta, such as ``nll_loss``, silently gets no gradient. ``restore_module`` puts the tensors back. Tensors
    that are registered nowhere stay, and torch refuses to compute with them. Returns the tensors that were
    replaced, by the ``id`` of what is in their place.
    """
    mode = FakeTensorMode()
    tensors = [
        tensor
        for tensor in (*module.parameters(), *module.buffers())
        if not tensor.device.type == device.type == "cpu"
    ]
    fakes = {id(tensor): _fake(tensor, device, mode) for tensor in tensors}
    _replace_tensors(module, fakes)
    return {id(fakes[id(tensor)]): tensor for tensor in tensors}


def _replace_tensors(module: torch.nn.Module, fakes: Mapping[int, torch.Tensor]) -> None:
    for registry in _registries(module):
        for name, value in registry.items():
            registry[name] = fakes.get(id(value), value)


def _fake(tensor: torch.Tensor, device: torch.device, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return torch.nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fake


def module_hooks(module: torch.nn.Module) -> tuple[int, ...]:
    """The numbers that torch gave the hooks of a module, of its forward and of its backward."""
    hooks: tuple[dict[int, Any], ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return tuple([number for registry in hooks for number in registry]) if any(hooks) else ()


def has_partial_backward_hook(module: torch.nn.Module) -> bool:
    """Whether the module has a hook of ``register_backward_hook``, which capture drops without a word."""
    return bool(module._backward_hooks) and module._is_full_backward_hook is False


def global_hooks() -> list[int]:
    """The numbers of the hooks that torch calls for every module."""
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return [number for kind in kinds for number in getattr(torch.nn.modules.module, f"_global_{kind}")]


def num_changes(tensor: torch.Tensor) -> int:
    """How often the tensor has been changed in place."""
    return tensor._version


@dataclass(frozen=True)
class DryRun:
    """What came of a call on fake tensors: the error that it raised, and whether it changed any object.

    A call that needs values fails on fake tensors alone, so that such an error says nothing of the model.
    """

    error: Exception | None
    changed: bool

    @property
    def failed(self) -> bool:
        if self.error is None or isinstance(self.error, NEEDS_VALUES):
            return False
        return not any(text in str(self.error) for text in NEEDS_MEMORY)


def dry_run(module: torch.nn.Module, args: tuple[Any, ...]) -> DryRun:
    """Call ``module(*args)`` in eager mode on fake tensors.

    What the first call of a model sets up stays, such as hooks; tensors and what holds tensors are put back.
    """
    containers = _containers(module)
    before = [copy.copy(container) for container in containers]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = (*module.parameters(), *module.buffers())
    error = None
    try:
        _replace_tensors(module, {id(tensor): _fake(tensor, tensor.device, mode) for tensor in tensors})
        fake_args = pytree.tree_map_only(torch.Tensor, lambda leaf: _fake(leaf, leaf.device, mode), args)
        with mode, silence_output(), skip_no_op_conversions():
            module(*fake_args)
    except Exception as raised:
        error = raised
    finally:
        changed = [_without_tensors(*pair) for pair in zip(containers, before, strict=True)]
    return DryRun(error, any(changed))


@contextlib.contextmanager
def skip_no_op_conversions() -> Iterator[None]:
    """Let ``module.to(...)`` leave fake parameters of that type alone, which torch would fail to swap."""
    swap = torch.utils.swap_tensors

    def swap_others(mine: torch.Tensor, converted: torch.Tensor) -> None:
        if (mine.dtype, mine.device, mine.shape) != (converted.dtype, converted.device, converted.shape):
            swap(mine, converted)  # type: ignore[no-untyped-call]

    torch.utils.swap_tensors = swap_others
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


def _without_tensors(container: Container, before: Container) -> bool:
    """Undo the changes of a container in which there are tensors. Returns whether any other is left."""
    if not isinstance(container, dict) or not isinstance(before, dict):
        _restore(container, before)
        return False
    new = {key: x for key, x in container.items() if x is not before.get(key) and not _holds_tensor(x)}
    _restore(container, {**before, **new})
    return bool(new)


def _holds_tensor(value: object) -> bool:
    leaves = pytree.tree_leaves(value)
    leaves += [held for leaf in leaves for held in pytree.tree_leaves(getattr(leaf, "__dict__", None))]
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves)


@contextlib.contextmanager
def silence_output() -> Iterator[None]:
    """Keep what is printed off the terminal: the model may print fake tensors, and torch a failed graph."""
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
