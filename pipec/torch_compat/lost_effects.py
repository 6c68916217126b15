"""Watches a forward that runs on fake tensors, and refuses what a graph of operators would lose."""

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pipec.torch_compat.foreign_classes import active_saved_tensors_hooks

LOST_FLAG = "forward() sets requires_grad of a parameter, which would not change it in steps"

LOST_GRADIENT = "forward() sets or asks for the grad of a parameter, which it does not have in steps"

LOST_PARAMETER = "forward() replaces a parameter or its data, which steps would not"

LOST_SEED = "forward() seeds torch's random generator or reads its state, from which stages do not draw"

LOST_HOOK = "the hook that forward() registers on the gradient of a parameter would be lost"

_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)

_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)

_properties: Any = Tensor  # whose attributes, read of the class, are descriptors

_FLAGS = (_properties.requires_grad.__set__, Tensor.requires_grad_)

_GRADIENTS = tuple(getattr(_properties.grad, name) for name in ("__get__", "__set__", "__delete__"))

_DATA, _SET_DATA = _properties.data.__get__, _properties.data.__set__

_GRAD_FN = _properties.grad_fn.__get__

_HOOK_NAMES = {each.__name__ for each in _HOOKS}

MEMORY = re.compile(
    "storage_offset|data_ptr|is_pinned|is_shared|is_set_to|untyped_storage|_base|_is_view|_version"
)
"""The attributes of tensors that tell of their memory, which is another in stages."""

_TORCH, _PIPEC = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])


class LostEffectError(TypeError):
    """A forward or its backward does something that a graph of operators would not do in a step."""


class OwnBackwardError(Exception):
    """The backward of a model is more than that of its operators: it must be traced, too."""


def refuse_lost_attribute(name: str, is_leaf: bool, file: str, line: int) -> None:
    """Raise LostEffectError for an attribute of a tensor, read on a line, that a graph would lose.

    Dynamo would register a hook on a leaf after the graph, and make a constant of a place in memory. The
    check of the first step does not see that: its rows are copies.
    """
    if is_leaf and name in _HOOK_NAMES:
        raise LostEffectError(LOST_HOOK)
    if MEMORY.fullmatch(name) and not file.startswith((_TORCH, _PIPEC)):
        raise LostEffectError(
            f"forward() reads {name} at {Path(file).name}:{line}, which differs in stages; pass what depends "
            "on it as an argument"
        )


class ForwardWatch(TorchFunctionMode):
    """Sees the calls of torch that a forward makes; raises LostEffectError for those that a graph would lose.

    Without ``with_backward``, that includes backwards that are more than those of operators: custom
    functions, hooks on gradients and saved tensors, gradients that the forward takes itself.

    Raises:
        OwnBackwardError: the forward has such a backward.
    """

    def __init__(self, with_backward: bool) -> None:
        super().__init__()
        self._with_backward = with_backward
        self._has_own_backward = False
        self._num_modes = 0

    @contextlib.contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Watch a call of ``module``."""
        parameters = [(each, dict(each._parameters)) for each in module.modules()]
        self._num_modes = len(_get_current_dispatch_mode_stack())
        with _refuse_seeding(), self:
            yield
        self._require_plain_backward(self._has_own_backward)  # the model may have caught the error
        if any(each._parameters.get(name) is not x for each, own in parameters for name, x in own.items()):
            raise LostEffectError(LOST_PARAMETER)

    def look_at(self, results: Iterable[object]) -> None:
        """Look for backwards of custom functions behind the results of the forward."""
        tensors = [each for each in results if isinstance(each, Tensor)]
        self._require_plain_backward(any(map(_is_custom, _backward_nodes(tensors))))

    def _require_plain_backward(self, has_own: bool) -> None:
        self._has_own_backward |= has_own
        if has_own and not self._with_backward:
            raise OwnBackwardError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOOKS:
            refuse_lost_attribute(func.__name__, args[0].is_leaf, "", 0)
            self._require_plain_backward(True)
        elif func in _FLAGS:
            value = args[1] if len(args) > 1 else True
            if isinstance(args[0], nn.Parameter) and value != args[0].requires_grad:
                raise LostEffectError(LOST_FLAG)
        elif func in _GRADIENTS:
            if isinstance(args[0], nn.Parameter) and _asks_for_gradient():
                raise LostEffectError(LOST_GRADIENT)
        elif func == _SET_DATA:
            if isinstance(args[0], nn.Parameter):
                raise LostEffectError(LOST_PARAMETER)
        elif func == _DATA:
            return args[0].detach()  # the same values, by an operator that a tracer sees
        elif MEMORY.fullmatch(name := _name(func)):
            caller = _caller()
            refuse_lost_attribute(name, False, caller.f_code.co_filename, caller.f_lineno)
        else:
            self._require_plain_backward(self._takes_gradients(func))
        return func(*args, **(kwargs or {}))

    def _takes_gradients(self, func: Any) -> bool:
        """Whether a call takes a gradient or a node of autograd, or a context sees what autograd does."""
        if func in _DIFFERENTIATE or (func == _GRAD_FN and not _called_by_library()):
            return True
        modes = len(_get_current_dispatch_mode_stack()) > self._num_modes
        return modes or active_saved_tensors_hooks() or torch.is_inference_mode_enabled()


def _name(func: Any) -> str:
    """The name of a function or, of a getter, that of the property."""
    name: str = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name


def _is_custom(node: Any) -> bool:
    """Whether a node of autograd is of a custom function; those of torch.library belong to operators."""
    kind = type(node)
    is_python = issubclass(kind, torch.autograd.function.BackwardCFunction)
    return is_python and not kind.__name__.startswith("GeneratedBackwardFor_")


def _backward_nodes(results: Iterable[Tensor]) -> Iterator[Any]:
    waiting = [each.grad_fn for each in results if each.grad_fn is not None]
    seen = set(waiting)
    for node in waiting:
        yield node
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                waiting.append(source)


@contextlib.contextmanager
def _refuse_seeding() -> Iterator[None]:
    """Refuse a forward that seeds torch's generators, or reads their state.

    Those of torch itself may, as checkpoints do. Only the seeds of CUDA's generators are compared.
    """
    generator, seeds = torch.random.default_generator, _cuda_seeds()
    torch.random.default_generator = _RefusingGenerator(generator)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.random.default_generator = generator
    if _cuda_seeds() != seeds:
        raise LostEffectError(LOST_SEED)


def _cuda_seeds() -> list[int]:
    is_used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [each.initial_seed() for each in torch.cuda.default_generators] if is_used else []


class _RefusingGenerator:
    """Stands for torch's generator in ``torch.random``. Torch itself may use it, as checkpoints do."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        if not _called_by_library("random.py", "_compile.py", "_dynamo/eval_frame.py"):
            raise LostEffectError(LOST_SEED)
        return getattr(self._generator, name)


def _asks_for_gradient() -> bool:
    """Whether a model asks for a gradient itself or calls ``zero_grad``, unlike torch's conversions."""
    return not _called_by_library() or sys._getframe(2).f_code is nn.Module.zero_grad.__code__


def _called_by_library(*passed_over: str) -> bool:
    """Whether code of torch or pipec is the innermost caller, but for these files of torch."""
    return bool(_caller(*passed_over).f_code.co_filename.startswith((_TORCH, _PIPEC)))


def _caller(*passed_over: str) -> Any:
    """The innermost frame that is not of this file, of contextlib, or of these files of torch."""
    frame: Any = sys._getframe(1)
    files = "overrides.py", "_tensor.py", *passed_over
    own = {__file__, contextlib.__file__, *(f"{_TORCH}/{file}" for file in files)}
    while frame.f_code.co_filename in own:
        frame = frame.f_back
    return frame
