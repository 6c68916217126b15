"""Gradients that notice when those of one rank are taken for the whole model's.

After a step that leaves gradients to the script, the gradients of each rank are of a subclass of Tensor. An
optimizer uses them as any others. But a number that is made of the norms of several of them, and a collective
over the same ranks, would be of this rank's parameters alone, and raise InputError. What is made of one
gradient, as a trust ratio of LARS is, is right on each rank.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipec.errors import InputError
from pipec.runtime.absent_tensors import plain_tensors
from pipec.torch_compat import pytree

_ADVICE = (
    "pipe.clip_grad_norm_(max_norm) and torch.nn.utils.clip_grad_norm_(pipe.parameters(), max_norm), called "
    "on every rank, return the norm of the whole model and clip by it; with math.inf they clip nothing"
)


class LocalGradient(Tensor):
    """A gradient of this rank's parameters, or what was computed of it element by element.

    ``sources`` are the numbers of the gradients that it was computed of.
    """

    sources: frozenset[int]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__module__", "") == "torch.distributed.distributed_c10d":
            raise InputError(
                f"{func.__name__} was given a gradient of this rank's stages, but other ranks hold the "
                "gradients of other parameters. Leave it out: pipe.step(...) has summed the gradients of "
                "replicas"
            )
        if func in _JOINS and len(_tensors(args, kwargs)) > 1:
            raise InputError(
                f"torch.{func.__name__} was given gradients of this rank's stages alone, not of the whole "
                f"model. {_ADVICE}"
            )
        with plain_tensors():
            found = func(*args, **(kwargs or {}))
        kind = LocalGradient if func in _ELEMENTWISE else LocalNorm if func in _NORMS else None
        if kind is not None and isinstance(found, Tensor):
            _mark(found, kind, _sources(_tensors(args, kwargs)))
        elif kind is not None:
            for norm, gradient in zip(found, args[0], strict=True):
                _mark(norm, kind, _sources([gradient]))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        with plain_tensors():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = memo[id(self)] = self.clone()
        return copied


class LocalNorm(Tensor):
    """The norm of such a gradient, or of each of some gradients of one rank."""

    sources: frozenset[int]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        tensors = _tensors(args, kwargs)
        sources = _sources(tensors)
        accumulates = func in _ACCUMULATES and type(args[0]) is not LocalNorm
        if (len(sources) > 1 or accumulates) and all(each.dim() == 0 for each in tensors):
            raise InputError(
                "norms of gradients are put together that are of this rank's stages alone, as SAM and "
                f"hand-written clipping do, and are not the whole model's. {_ADVICE}"
            )
        if func in _NUMBERS:
            warnings.warn(
                "this is the norm of one parameter's gradient on this rank; the sum over the parameters of "
                f"this rank is not the whole model's: {_ADVICE}",
                stacklevel=3,
            )
        with plain_tensors():
            found = func(*args, **(kwargs or {}))
        if func in _ELEMENTWISE or func in _SUMS:
            _mark(found, LocalNorm, sources)
        return found


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Let the gradients be of ``LocalGradient``, each with a number."""
    for number, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse:
            _mark(gradient, LocalGradient, frozenset([number]))


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """Let all gradients be plain tensors again, to which a step adds its own."""
    for parameter in parameters:
        gradient = parameter.grad
        if type(gradient) is LocalGradient:
            del gradient.sources
            gradient.__class__ = Tensor  # type: ignore[assignment]


def _mark(tensor: Tensor, kind: type[LocalGradient | LocalNorm], sources: frozenset[int]) -> None:
    if type(tensor) is Tensor or type(tensor) is kind:
        tensor.__class__ = kind
        tensor.sources = sources  # type: ignore[attr-defined]


def _sources(tensors: Iterable[Tensor]) -> frozenset[int]:
    """The numbers of the gradients of which these tensors were computed."""
    own = [each.sources for each in tensors if type(each) in (LocalGradient, LocalNorm)]  # type: ignore[attr-defined]
    return frozenset().union(*own)


def _tensors(args: object, kwargs: object) -> list[Tensor]:
    return [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]


def _functions(owner: object, names: str) -> frozenset[Callable[..., Any]]:
    return frozenset(getattr(owner, name) for name in names.split() if hasattr(owner, name))


_ELEMENTWISE = (
    _functions(
        Tensor,
        "mul div true_divide neg abs pow square sqrt detach float double to cpu flatten reshape view "
        "__rmul__ __pow__",
    )
    | _functions(torch, "mul div true_divide neg abs pow square sqrt flatten reshape")
    | {Tensor.data.__get__}  # type: ignore[attr-defined]
)
"""What is still a gradient of one rank, or its norm."""

_NORMS = (
    _functions(Tensor, "norm sum")
    | _functions(torch, "norm sum _foreach_norm dot vdot")
    | _functions(torch.linalg, "norm vector_norm matrix_norm")
)
"""What makes numbers of it that a norm of the whole model is made of."""

_ACCUMULATES = _functions(Tensor, "add_ __iadd__")

_SUMS = _ACCUMULATES | _functions(Tensor, "add __radd__") | _functions(torch, "add")

_JOINS = _functions(torch, "cat concat concatenate stack hstack vstack")
"""What makes one tensor of several."""

_NUMBERS = _functions(Tensor, "item __float__ tolist")
