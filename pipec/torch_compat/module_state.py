"""Restores a module after tracing, replaces its tensors by fake ones, and calls it on fake tensors."""

import contextlib
import copy
import functools
import io
import logging
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipec.torch_compat import pytree

OF_MODELS = "Expected all tensors to be on the same device"
"""The error of ``FakeTensorMode`` that real tensors raise, too. Its others mean that it needs values."""


NEEDS_MEMORY = ("not allocated yet", "access data pointer", "access storage", "for tensor subclasses")
"""Parts of the errors that kernels and ``Tensor.numpy`` raise for a tensor without memory."""


LOGGERS = (
    "torch._dynamo",
    "torch._export",
    "torch._functorch",
    "torch._guards",
    "torch._subclasses",
    "torch.fx",
)


@contextlib.contextmanager
def quiet_logging() -> Iterator[None]:
    """Keep torch's advice about tracing off the terminal, and its warnings."""
    with quiet_loggers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def quiet_loggers() -> Iterator[None]:
    """Keep torch's loggers off the terminal, except those that TORCH_LOGS turned up."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
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
    """Let operators compute in the dtypes of their operands."""
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
        for container, original in zip(containers, before, strict=True):
            _restore(container, original)


Container = dict[Any, Any] | list[Any] | set[Any]


def _containers(module: torch.nn.Module) -> list[Container]:
    """The ``__dict__`` of the module and of every module in it, and the dicts, lists and sets in these.

    Also the ``__dict__`` of other objects that are attributes, such as a configuration.
    """
    containers: list[Container] = []
    for each in module.modules():
        containers.append(each.__dict__)
        for x in vars(each).values():
            if isinstance(x, dict | list | set):
                containers.append(x)
            elif not isinstance(x, _NO_STATE) and isinstance(own := getattr(x, "__dict__", None), dict):
                containers.append(own)
    return containers


_NO_STATE = (torch.nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType)
"""Attributes that are restored elsewhere, or are code."""


def _restore(container: Container, original: Container) -> None:
    """Restore a container if it has changed. Others are not written: a dict subclass may refuse it."""
    if _contents(container) == _contents(original):
        return
    if isinstance(container, list):
        container[:] = original
    else:
        container.clear()
        container.update(original)


def _contents(container: Container) -> list[Any]:
    """The keys and the identities of the objects in a container, to find changes."""
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return [id(value) for value in container]


@contextlib.contextmanager
def without_gradients(module: torch.nn.Module) -> Iterator[None]:
    """Let parameters have no ``.grad`` inside a ``with``.

    If one is a view, as the gradients of a rank are, Dynamo gives the sizes of its base symbols, and makes
    them constants: it would seem that a size of the arguments had become one.
    """
    held = [(each, each.grad) for each in module.parameters() if each.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient


def replace_with_fake_tensors(module: torch.nn.Module, device: torch.device) -> dict[int, torch.Tensor]:
    """Replace parameters and buffers by fake ones on ``device``, without memory, unless both are on the CPU.

    Returns the replaced tensors, by the ``id`` of their fake ones. Operators differ between device types, a
    model may be larger than the memory of a device, and its tensors may be on several devices. The meta
    device would not do: there torch decomposes attention, and a composite operator with a kernel for meta,
    such as ``nll_loss``, silently gets no gradient. ``restore_module`` puts the tensors back. Unregistered
    tensors are not replaced, and torch refuses to compute with them.
    """
    mode = FakeTensorMode()
    tensors = [
        tensor
        for tensor in (*module.parameters(), *module.buffers())
        if not tensor.device.type == device.type == "cpu"
    ]
    fakes = {id(tensor): fake_tensor(tensor, device, mode) for tensor in tensors}
    replace_tensors(module, fakes)
    return {id(fakes[id(tensor)]): tensor for tensor in tensors}


def replace_tensors(module: torch.nn.Module, fakes: Mapping[int, torch.Tensor]) -> None:
    """Replace tensors by others, given by their ``id``; ``restore_module`` puts them back.

    They are replaced in lists, too: recurrent layers move their weights if a list of theirs has others.
    """

    def replaced(value: Any) -> Any:
        if type(value) is weakref.ref and id(value()) in fakes:
            return weakref.ref(fakes[id(value())])
        return fakes.get(id(value), value)

    registries = [x for m in module.modules() for x in (m.__dict__, m._parameters, m._buffers)]
    for registry in registries:
        for name, value in registry.items():
            registry[name] = replaced(value)
            if type(value) is list:
                value[:] = map(replaced, value)


def fake_tensor(tensor: torch.Tensor, device: torch.device, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor like this one on ``device``, without values."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return torch.nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fake


def has_partial_backward_hook(module: torch.nn.Module) -> bool:
    """Whether the module has a hook of ``register_backward_hook``, which capture silently drops."""
    if not module._backward_hooks:
        return False
    try:
        module.register_full_backward_hook(lambda *call: None).remove()
    except RuntimeError:  # a module has hooks of one kind
        return True
    return False


@dataclass(frozen=True)
class DryRun:
    """The result of a call on fake tensors: the error that it raised, and whether it changed any object.

    A call that needs values fails on fake tensors only, and does not count as ``failed``.
    """

    error: Exception | None
    changed: bool

    @property
    def failed(self) -> bool:
        if self.error is None:
            return False
        if type(self.error).__module__ == FakeTensorMode.__module__:
            return str(self.error).startswith(OF_MODELS)
        return not any(text in str(self.error) for text in NEEDS_MEMORY)


def dry_run(module: torch.nn.Module, args: tuple[Any, ...]) -> DryRun:
    """Call ``module(*args)`` in eager mode on fake tensors.

    Objects that a model's first call creates, such as hooks, are kept. Tensors, and objects with tensors, are
    restored. Functions that the model compiles run uncompiled: kernels would read the memory of fake tensors.
    """
    containers = _containers(module)
    before = [copy.copy(container) for container in containers]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = (*module.parameters(), *module.buffers())
    error = None
    try:
        replace_tensors(module, {id(tensor): fake_tensor(tensor, tensor.device, mode) for tensor in tensors})
        fake_args = pytree.tree_map_only(
            torch.Tensor, lambda leaf: fake_tensor(leaf, leaf.device, mode), args
        )
        uncompiled = torch.compiler.set_stance("force_eager")
        with mode, uncompiled, silence_output(), skipped_no_op_conversions(module):
            module(*fake_args)
    except Exception as raised:
        error = raised
    finally:
        changed = [_restore_tensors(*pair) for pair in zip(containers, before, strict=True)]
    return DryRun(error, any(changed))


def _restore_tensors(container: Container, before: Container) -> bool:
    """Undo changes of a container, except new objects without tensors. Returns whether there are any."""
    if not isinstance(container, dict) or not isinstance(before, dict):
        _restore(container, before)
        return False
    new = {key: x for key, x in container.items() if x is not before.get(key) and not _holds_tensor(x)}
    _restore(container, {**before, **new})
    return bool(new)


def _holds_tensor(value: object) -> bool:
    leaves = pytree.tree_leaves(value)
    leaves += [inner for leaf in leaves for inner in pytree.tree_leaves(getattr(leaf, "__dict__", None))]
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves)


@contextlib.contextmanager
def skipped_no_op_conversions(module: torch.nn.Module) -> Iterator[None]:
    """Let ``to`` of each module in ``module`` leave fake tensors that it need not convert as they are.

    Torch would fail to replace them.
    """

    def convert(each: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        tensors = (*each.parameters(), *each.buffers())
        converts = any(tensor.to(*args, **kwargs) is not tensor for tensor in tensors)
        return type(each).to(each, *args, **kwargs) if converts else each

    modules = [each for each in module.modules() if "to" not in vars(each)]
    for each in modules:
        object.__setattr__(each, "to", functools.partial(convert, each))
    try:
        yield
    finally:
        for each in modules:
            object.__delattr__(each, "to")


@contextlib.contextmanager
def silence_output() -> Iterator[None]:
    """Discard printed text: the model may print fake tensors, and torch a failed graph."""
    discarded = io.StringIO()
    with contextlib.redirect_stdout(discarded), contextlib.redirect_stderr(discarded):
        yield
