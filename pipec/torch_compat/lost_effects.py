"""Refuses a forward that runs on fake tensors and changes, or asks for, what a graph cannot hold."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

LOST_FLAG = "forward() sets requires_grad of a parameter, which would not change it in steps"


LOST_GRADIENT = "forward() sets or asks for the grad of a parameter, which it does not have in steps"


LOST_PARAMETER = "forward() replaces a parameter or its data, which steps would not"


LOST_SEED = "forward() seeds torch's random generator or reads its state, from which stages do not draw"


_TORCH, _PIPEC = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])


@contextlib.contextmanager
def refuse_lost_effects() -> Iterator[None]:
    """Raise a TypeError where a model changes more of parameters than values, or uses torch's generator."""
    tensor: Any = torch.Tensor
    flag, gradient, data, register = (
        tensor.requires_grad,
        tensor.grad,
        tensor.data,
        nn.Module.register_parameter,
    )
    generator = torch.random.default_generator
    lazy_call: Any = torch.cuda.random._lazy_call

    def set_flag(self: torch.Tensor, value: bool = True) -> torch.Tensor:
        is_changed = isinstance(self, nn.Parameter) and value != self.requires_grad
        if is_changed and _model_calls("_tensor.py", "nn/modules/module.py"):
            raise TypeError(LOST_FLAG)
        flag.__set__(self, value)
        return self

    def require_no_parameter(self: torch.Tensor) -> torch.Tensor:
        in_zero_grad = sys._getframe(2).f_code is nn.Module.zero_grad.__code__
        if isinstance(self, nn.Parameter) and (in_zero_grad or _model_calls()):
            raise TypeError(LOST_GRADIENT)
        return self

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(self, nn.Parameter) and _model_calls():
            raise TypeError(LOST_PARAMETER)
        data.__set__(self, value)

    def register_new(self: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if self._parameters.get(name) is not None and _model_calls("nn/modules/module.py"):
            raise TypeError(LOST_PARAMETER)
        register(self, name, value)

    def call_lazily(*args: Any, **kwargs: Any) -> None:
        _refuse_seeding()
        lazy_call(*args, **kwargs)

    tensor.requires_grad = property(flag.__get__, set_flag)  # type: ignore[arg-type]
    tensor.requires_grad_ = set_flag
    tensor.grad = property(
        lambda self: gradient.__get__(require_no_parameter(self)),
        lambda self, value: gradient.__set__(require_no_parameter(self), value),
        gradient.__delete__,
    )
    tensor.data = property(data.__get__, set_data)
    nn.Module.register_parameter = register_new  # type: ignore[method-assign,assignment]
    torch.random.default_generator = _RefusingGenerator(generator)  # type: ignore[assignment]
    torch.cuda.random._lazy_call = call_lazily
    try:
        yield
    finally:
        del tensor.requires_grad, tensor.requires_grad_, tensor.grad, tensor.data
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        torch.random.default_generator = generator
        torch.cuda.random._lazy_call = lazy_call


class _RefusingGenerator:
    """Stands for torch's generator in ``torch.random``. Torch itself may use it, as checkpoints do."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        _refuse_seeding()
        return getattr(self._generator, name)


def _refuse_seeding() -> None:
    if _model_calls("random.py", "cuda/random.py", "_compile.py", "_dynamo/eval_frame.py"):
        raise TypeError(LOST_SEED)


def _model_calls(*passed_over: str) -> bool:
    """Whether code of a model is the innermost caller, but for these files of torch and contextlib."""
    frame: Any = sys._getframe(1)
    files = {__file__, contextlib.__file__, *(f"{_TORCH}/{file}" for file in passed_over)}
    while frame.f_code.co_filename in files:
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith((_TORCH, _PIPEC))
