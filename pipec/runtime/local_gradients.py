"""Gradients of one rank, whose norms together are those of the whole model.

After a step that leaves gradients to the script, where ranks have other parameters, the gradients of each
rank are of a subclass of Tensor. An optimizer uses them as any others, and what is made of one gradient, as a
trust ratio of LARS is, is right on each rank. Norms of several that are stacked, and reduced to one number,
as ``torch.nn.utils.clip_grad_norm_`` does, are gathered from all ranks before. Whatever else would be made of
several gradients would be of this rank's parameters alone, and raises InputError.
"""

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from pipec.errors import InputError
from pipec.runtime.absent_tensors import plain_tensors
from pipec.runtime.call_agreement import CallAgreement
from pipec.runtime.tensors import Tensors
from pipec.torch_compat import pytree

_ADVICE = (
    "pipe.clip_grad_norm_(max_norm), called on every rank, clips by the norm of the whole model and returns "
    "it, and clips nothing with math.inf; pipec.compile(..., optimizer=..., clip_grad_norm=...) clips in "
    "each step"
)


_INSTEAD = "where some rank has none of them, pipe.clip_grad_norm_ takes the norm"


class GradientNorms:
    """Marks the gradients of this rank, and gathers the norms of those of the whole model."""

    def __init__(self, tensors: Tensors, agreement: CallAgreement) -> None:
        self._tensors, self._agreement = tensors, agreement

    def mark(self) -> None:
        """Let the gradients be LocalGradients, each with the number of its parameter."""
        norms = weakref.ref(self)
        with plain_tensors():
            for number, parameter in enumerate(self._tensors.names.unique_parameters().values()):
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = marked = parameter.grad.as_subclass(LocalGradient)
                    marked.norms, marked.numbers = norms, (number,)

    def parameter(self, number: int) -> Tensor:
        """The parameter of this number."""
        return [*self._tensors.names.unique_parameters().values()][number]

    def unmark(self) -> None:
        """Let all gradients be plain tensors again, to which a step adds its own."""
        with plain_tensors():
            for parameter in self._tensors.names.unique_parameters().values():
                if isinstance(parameter.grad, LocalGradient):
                    parameter.grad = parameter.grad.as_subclass(Tensor)

    @torch.no_grad()
    def total(self, call: str, norm_type: float) -> Tensor:
        """The norm of the gradients of the unsplit model. A tied parameter counts once."""
        with plain_tensors():
            own = {
                number: torch.linalg.vector_norm(parameter.grad, norm_type)
                for number, parameter in enumerate(self._tensors.names.unique_parameters().values())
                if parameter.grad is not None
            }
        norms = self.gathered(call, own, is_alone=False)
        return torch.linalg.vector_norm(norms, norm_type) if len(norms) else torch.zeros(())

    def is_alone(self) -> bool:
        """Whether one rank alone trains parameters, so that others do not come to the norms of a script."""
        unique, owners = self._tensors.names.unique_parameters(), self._tensors.owner_ranks
        ranks = {rank for x, p in unique.items() if p.requires_grad for rank in owners.get(x, (0,))}
        return len(ranks) == 1

    def gathered(self, call: str, own: Mapping[int, Tensor], is_alone: bool) -> Tensor:
        """The numbers that the ranks have for gradients of the model, on the host, in the model's order.

        ``own`` has this rank's by the number of the parameter. ``call`` is what all ranks call, unless this
        one ``is_alone``.
        """
        names = [*self._tensors.names.unique_parameters()]
        table = torch.zeros(2, len(names), dtype=torch.float64)  # the dtype of a number, and its value
        by_device: dict[torch.device, dict[int, Tensor]] = defaultdict(dict)
        for number, value in own.items():
            if self._tensors.is_source(names[number]):
                by_device[value.device][number] = value
        with plain_tensors():
            for found in by_device.values():  # one copy each: the host waits for it
                codes = [1 + _DTYPES.index(each.dtype) for each in found.values()]
                table[0, [*found]] = torch.tensor(codes, dtype=torch.float64)
                table[1, [*found]] = torch.stack([*found.values()]).to("cpu", torch.float64)
        if self._agreement.is_distributed and not is_alone:
            self._agreement.require_same_call(call, {})
            every = self._agreement.ranks.all_gather(table, f"calling {call}", limited=True)
            table = torch.stack(every).sum(0)
        values = [value.to(_DTYPES[int(dtype) - 1]) for dtype, value in zip(*table, strict=True) if dtype]
        return torch.stack(values) if values else torch.zeros(0)


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class LocalGradient(Tensor):
    """A gradient of this rank's parameters, or what was computed of one.

    ``numbers`` are those of the parameters: one, or for stacked norms one each. It keeps no pipeline alive.
    """

    norms: weakref.ref[GradientNorms]
    numbers: tuple[int, ...]

    @property
    def is_whole_gradient(self) -> bool:
        """Whether it is the gradient of a parameter, which momentum adds up, and nothing made of it."""
        norms = self.norms()
        return norms is not None and norms.parameter(self.numbers[0]).grad is self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        own = [each for each in tensors if isinstance(each, LocalGradient)]
        first, kind = own[0], type(own[0])
        numbers, is_of_lists = first.numbers, name.startswith(("_foreach_", "_fused_"))
        _refuse_reductions(func, name)
        if name == "stack" and all(type(each) is LocalGradient and each.dim() == 0 for each in tensors):
            kind, numbers = StackedNorms, tuple(number for each in own for number in each.numbers)
            if len({*numbers}) < len(numbers) or any(each.norms is not first.norms for each in own):
                _refuse(name)
        elif not is_of_lists and (
            any((type(x), x.norms, x.numbers) != (kind, first.norms, numbers) for x in own)
            or (_accumulates(name, args, kwargs, tensors) and not first.is_whole_gradient)
            or (name in _JOINS and len(own) == len(tensors))
        ):
            _refuse(name)
        elif isinstance(first, StackedNorms) and name in _REDUCTIONS:
            return first.reduced(func, name, args, kwargs)
        if name in _NUMBERS and first.dim() == 0:
            warnings.warn(
                "a number such as the norm of one parameter's gradient on this rank was read; the sum over "
                f"the parameters of this rank is not the whole model's: {_ADVICE}",
                stacklevel=2,
            )
        with plain_tensors():
            found = func(*args, **kwargs)
        if kind is StackedNorms:
            made = [each for each in pytree.tree_leaves([found]) if isinstance(each, Tensor)]
            if name in _NUMBERS or any(each.shape != (len(numbers),) for each in made):
                _refuse(name)
        if name == "clone" or name.startswith("new_") or name.endswith("_like"):
            return found  # as new gradients and the state of optimizers are
        if name == "__get__" and getattr(func, "__self__").__name__ not in _VIEWS:  # noqa: B009
            return found
        given = set(map(id, tensors))

        def marked(made: Any, source: LocalGradient, numbers: tuple[int, ...]) -> Any:
            is_new = isinstance(made, Tensor) and id(made) not in given
            has_values = is_new and (made.is_floating_point() or made.is_complex())
            return _marked(made, kind, source.norms, numbers) if has_values else made

        if is_of_lists and isinstance(found, list | tuple):
            pairs = zip(found, args[0], strict=True)
            return [marked(x, g, g.numbers) if isinstance(g, LocalGradient) else x for x, g in pairs]
        return pytree.tree_map(lambda each: marked(each, first, numbers), found)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with plain_tensors():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = memo[id(self)] = self.clone()
        return copied


class StackedNorms(LocalGradient):
    """A number of each of some gradients of one rank, such as its norm."""

    def reduced(self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Any) -> Any:
        """What ``func`` makes of the numbers of all ranks."""
        norms = self.norms()
        if norms is None:
            raise InputError(
                f"torch.{name} was given norms of gradients of a pipeline that was freed; keep it"
            )
        with plain_tensors():
            own = dict(zip(self.numbers, self.unbind(), strict=True))
            call = f"torch.{name} of norms of gradients ({_INSTEAD})"
            every = norms.gathered(call, own, norms.is_alone())
            return func(every.to(self.device), *args[1:], **kwargs)


def _marked(
    tensor: Tensor, kind: type[LocalGradient], norms: weakref.ref[GradientNorms], numbers: tuple[int, ...]
) -> Tensor:
    with plain_tensors():
        marked = tensor.as_subclass(kind)
    marked.norms, marked.numbers = norms, numbers
    return marked


def _refuse_reductions(func: Callable[..., Any], name: str) -> None:
    """Refuse collectives, and a scaler, which would find out on each rank alone whether to skip a step."""
    if getattr(func, "__module__", "") == "torch.distributed.distributed_c10d":
        raise InputError(
            f"{name} was given a gradient of this rank's stages, but other ranks hold the gradients of other "
            "parameters. Leave it out: pipe.step(...) has summed the gradients of replicas"
        )
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        raise InputError(
            "GradScaler would skip steps on each rank alone. Leave it out: pipec.compile(..., "
            'optimizer=..., precision="fp16-mixed") scales the loss, and all ranks skip a step'
        )


def _accumulates(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> bool:
    """Whether a number of one gradient is added to a plain number or tensor, or written into one."""
    if name == "__setitem__" and not isinstance(args[0], LocalGradient):
        return tensors[-1].dim() == 0
    is_zero = [type(each) for each in args[1:]] == [int] and args[1] == 0
    is_sum = name in ("add", "__radd__") and is_zero  # as Python's sum begins
    is_added = name in ("add_", "__iadd__") and not isinstance(args[0], LocalGradient)
    return (is_sum or is_added or "out" in kwargs) and all(each.dim() == 0 for each in tensors)


def _refuse(name: str) -> NoReturn:
    raise InputError(
        f"torch.{name} was given gradients, or norms of them, that are of this rank's stages alone, not of "
        f"the whole model. {_ADVICE}"
    )


_JOINS = {"cat", "concat", "concatenate", "hstack", "vstack"}

_VIEWS = {"data", "T", "mT", "real"}
"""The properties of a gradient that have its values."""

_REDUCTIONS = {"norm", "linalg_norm", "linalg_vector_norm", "vector_norm", "sum", "max", "amax"}

_NUMBERS = {"item", "__float__", "tolist", "numpy", "__array__"}
