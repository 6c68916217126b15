"""Losses that say what a script should call instead of what torch would answer."""

import sys
from typing import Any, Self

from torch import Tensor, nn

from pipec.errors import InputError

STEP_LOSS = (
    "pipe.step(...) has already computed the gradients, and added them to .grad: leave out loss.backward(), "
    "and multiply the loss, if at all, inside of the model or loss_fn. For a loop that calls backward(), "
    "module = pipe.as_module() returns losses that have one"
)
EVAL_LOSS = "pipe.eval_step(...) computes no gradients; call pipe.step(...) for a loss with gradients"

FORWARD_OUTPUT = (
    "this call of pipe(...) has computed no gradients, so that what is computed of its output has no "
    "backward. Call pipe.step(inputs, target=...) with loss_fn=... in pipec.compile, or with a model that "
    "returns its loss: it computes the loss and its gradients. For a loop that calls backward(), "
    "module = pipe.as_module() makes module(inputs, target=...) return a loss that has one"
)

_SCALED = (
    "GradScaler cannot scale the loss of a pipeline, because each rank has the gradients of its own stages: "
    'leave the scaler out. With precision="fp16-mixed" and optimizer=..., pipec.compile scales the loss and '
    "skips steps"
)


class Loss(Tensor):
    """Looks like a plain tensor wherever it is printed, formatted, copied or written."""

    def plain(self) -> Tensor:
        """The value as a tensor of torch's own class, without a graph."""
        return self.detach().as_subclass(Tensor)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __format__(self, spec: str) -> str:
        return format(self.plain(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.plain().clone()

    def __mul__(self, other: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") == "torch.amp.grad_scaler":
            raise InputError(_SCALED)
        return super().__mul__(other)

    __rmul__ = __mul__


class StepLoss(Loss):
    """The loss of a call that has computed its gradients, or has none: ``backward`` explains that.

    What operations on it return are plain tensors.
    """

    __torch_function__ = nn.Parameter.__torch_function__  # results are plain tensors
    _explanation: str

    @classmethod
    def of(cls, loss: Tensor, explanation: str) -> Self:
        """``loss`` itself, in the same memory."""
        explaining = loss.as_subclass(cls)
        explaining._explanation = explanation
        return explaining

    def backward(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(getattr(self, "_explanation", STEP_LOSS))


class ForwardOutput(Loss):
    """An output of a pipeline in training mode: ``backward`` of what is computed of it explains itself."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(FORWARD_OUTPUT)


class ModuleLoss(Loss):
    """The loss of a module of ``as_module``; it is also its own ``.loss``, ``["loss"]`` and ``[0]``.

    So a loop finds it wherever the model would have put it. What is computed of it is of this class, too.
    """

    @property
    def loss(self) -> Tensor:
        return self

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, str) and index != "loss":
            raise KeyError(f"{index}: {_LOSS_ALONE}")
        if index == "loss" or (self.dim() == 0 and type(index) is int and index == 0):
            return self
        if self.dim() == 0 and type(index) is int:
            raise InputError(f"result {index} of a module: {_LOSS_ALONE}")
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        if self.dim() == 0:
            raise InputError(_LOSS_ALONE)
        return super().__iter__()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no {name}: {_LOSS_ALONE}")


_LOSS_ALONE = (
    "in training a module returns the loss alone; that of pipe.as_module(outputs=True) returns the rest too, "
    'and that of pipe.as_module(outputs="differentiable") with gradients, for a loss that a script computes'
)
