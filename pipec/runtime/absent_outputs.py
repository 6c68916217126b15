"""Outputs that the ranks of the last stage alone have, and tensors without values for them on other ranks.

So a script runs alike on all ranks. What is computed of an absent output has shape, dtype, device and a
graph, and no values either. Its memory is on meta, so that it costs no time. What reads a value raises
InputError. Once ``backward`` was called on a loss, all ranks know its value.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from pipec.errors import InputError
from pipec.runtime.loss_tensors import Loss
from pipec.runtime.processes.judge import format_ranks
from pipec.torch_compat import pytree


class LastOutput(Loss):
    """An output that only the ranks of the last stage get, or what a script computes of it."""

    differentiated: ClassVar["LastOutput | None"] = None
    """The tensor of one element on which ``backward`` was called, while that runs."""

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        before, LastOutput.differentiated = LastOutput.differentiated, self if self.numel() == 1 else None
        try:
            torch.autograd.backward(self, gradient, *args, **kwargs)
        finally:
            LastOutput.differentiated = before


class AbsentOutput(LastOutput):
    """A ``LastOutput`` on another rank. Other tensors of an operation are taken without their values, too."""

    place: ClassVar[str]
    """Where the values are, as text."""
    own_device: ClassVar[torch.device]
    """Where the output would be in this process."""
    value: float | None = None
    """That of a loss, which its ``backward`` has found out."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func == _GET_DEVICE:
            return cls.own_device
        if func in (Tensor.cpu, Tensor.cuda):
            return args[0]
        if func == torch.autograd.grad:
            return super().__torch_function__(func, (cls,), args, kwargs)  # type: ignore[no-untyped-call]
        caller = getattr(func, "__module__", None) or sys._getframe(1).f_globals.get("__name__", "")
        if func in _READ_MEMORY or caller == "torch.distributed.distributed_c10d":
            cls.refuse(_name(func))
        given, structure = pytree.tree_flatten((_without_masks_and_moves(func, args), kwargs or {}))
        leaves = [cls._without_values(x, _name(func)) if isinstance(x, Tensor) else x for x in given]
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        if "device" in kwargs:
            kwargs["device"] = "meta"
        try:
            result = super().__torch_function__(func, (cls,), args, kwargs)  # type: ignore[no-untyped-call]
        except (RuntimeError, TypeError, BufferError) as error:
            if "meta" in str(error).lower():
                cls.refuse(_name(func), error)
            raise
        if any(x is not y and y._version for x, y in zip(given, leaves, strict=True)):
            cls.refuse(f"{_name(func)}, which writes into a tensor with values,")
        return result

    @classmethod
    def _without_values(cls, tensor: Tensor, func: str) -> Tensor:
        if isinstance(tensor, AbsentOutput):
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"{func} was given a tensor that requires gradients beside an output of "
                f'as_module(outputs="last"). The loss, and so its gradient, is {cls.place} alone: {_ADVICE}'
            )
        return tensor.to("meta")

    @classmethod
    def refuse(cls, what: str, cause: Exception | None = None) -> NoReturn:
        """Raise InputError, because ``what`` needs values."""
        raise InputError(
            f'{what} needs values of an output of as_module(outputs="last"), or of what was computed of it. '
            f"They are {cls.place} alone: read them there, or {_ADVICE}. After loss.backward(), every rank "
            "has the value of this loss"
        ) from cause

    def backward(self, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """As ``Tensor.backward``. A loss then is a tensor with a value, and without a graph."""
        super().backward(
            None if gradient is None else self._without_values(gradient, "backward"), *args, **kwargs
        )
        if self.value is not None:
            made = torch.full(self.shape, self.value, dtype=self.dtype, device=self.own_device)
            if made.item() != self.value:  # under autocast, which leaves out meta, the dtype may differ
                made = made.to(torch.float64).fill_(self.value)
            with contextlib.suppress(RuntimeError):  # of a loss that another graph has saved without a value
                torch.utils.swap_tensors(self, made)

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"<{str(self.dtype).removeprefix('torch.')}{list(self.shape)}, {self.place}>"

    def __format__(self, spec: str) -> str:
        return self.refuse(f"formatting as {spec!r}") if spec else repr(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.refuse("saving")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.refuse("copy.deepcopy")


def absent_output(memory: Tensor, ranks: Sequence[int], device: torch.device) -> AbsentOutput:
    """A tensor on meta as one of this ``device``, with values that these ``ranks`` have."""
    return memory.as_subclass(_kind(f"on {format_ranks(ranks)}", device))


@functools.cache
def _kind(place: str, device: torch.device) -> type[AbsentOutput]:
    return type("AbsentOutput", (AbsentOutput,), {"place": place, "own_device": device})


def _without_masks_and_moves(func: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a function that work on meta.

    Masks with values, which index a tensor, become the numbers of the elements that they choose. What is
    moved to a device stays on meta.
    """
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        parts = list[Any]()
        for each in args[1] if isinstance(args[1], tuple) else (args[1],):
            is_mask = isinstance(each, Tensor) and each.dtype is torch.bool and each.dim() > 0
            has_values = is_mask and not isinstance(each, AbsentOutput)
            parts += each.nonzero(as_tuple=True) if has_values else (each,)
        return args[0], tuple(parts), *args[2:]
    is_moved = func == Tensor.to and len(args) > 1 and isinstance(args[1], _DEVICES)
    return (args[0], "meta", *args[2:]) if is_moved else tuple(args)


def _name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    return name.strip("_") if name.startswith("__") else name


_ADVICE = 'pass outputs="differentiable", with which every rank has all outputs and computes the loss'

_DEVICES = str, int, torch.device

_GET_DEVICE = Tensor.device.__get__

_READ_MEMORY = {Tensor.data_ptr, Tensor.storage, Tensor.untyped_storage, Tensor.numpy, Tensor.__array__}
