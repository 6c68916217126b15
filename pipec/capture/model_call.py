"""The arguments of one call of the model, and which of their tensors are split along the batch.

In the call of a step whose microbatches are given, each of these is a batch of its own, and nothing is split.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from pipec.errors import InputError, TargetRowsError
from pipec.ir import Variable
from pipec.ir.argument_checks import short_repr
from pipec.ir.batch_axis import LEADING, BatchAxis
from pipec.ir.batch_split import leaf_path
from pipec.torch_compat import pytree
from pipec.torch_compat.compared_values import has_forward_pre_hooks


@dataclass(frozen=True)
class ModelCall:
    """What ``step`` was given. Its leaves are what tuples, lists, dicts and the like hold, at any depth.

    The order of keyword arguments that ``forward`` names means nothing. ``split`` says for each
    leaf where the user has the batch, None where every microbatch needs all of it. A leaf that is split has
    its rows in front here, and ``Step`` puts them back. ``split`` is None in the call of a whole batch, whose
    tensors say so by their sizes. A microbatch gets ``split`` from its batch: with two rows, an edge list of
    shape (2, n) would look batched. ``ambiguous_leaves`` are the paths of those that may not be split after
    all, each with the name of its argument. ``strided`` are the positions of leaves with their rows elsewhere
    that are not contiguous as the user passes them. ``keyword_order`` has the names of keyword arguments in
    the user's order, if ``forward`` gets them in a dict and may ask for it.
    ``repeated`` has the leaves at which a tensor is passed again, each with the leaf that has it first.

    A step of given microbatches is a call like its largest one, with all in ``given`` and the ``weights`` of
    their losses. Nothing is split there: ``split`` has None alone, and each microbatch counts as one row.

    What is read off the arguments is kept, because the checks before a step read it several times.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any = None
    split: tuple[BatchAxis | None, ...] | None = None
    ambiguous_leaves: Mapping[str, str | int] = field(default_factory=dict)
    strided: tuple[int, ...] = ()
    keyword_order: tuple[str, ...] = ()
    repeated: tuple[tuple[int, int], ...] = ()
    given: tuple["ModelCall", ...] = ()
    weights: tuple[float, ...] = ()

    @property
    def parts(self) -> tuple["ModelCall", ...]:
        """The given microbatches; if there are none, the call alone."""
        return self.given or (self,)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is split, as in a given microbatch."""
        return self.split is not None and not any(self.split)

    @property
    def tree(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Arguments, keyword arguments in alphabetical order, and target."""
        return self.args, dict(sorted(self.kwargs.items())), self.target

    @functools.cached_property
    def leaves(self) -> list[Any]:
        return pytree.tree_leaves(self.tree)

    @functools.cached_property
    def paths(self) -> list[str]:
        """The name of each leaf as Python writes it: ``args[0]``, ``kwargs['mask']``, ``target``."""
        tree = dict(zip(("args", "kwargs", "target"), self.tree, strict=True))
        return [leaf_path(keys) for keys, _ in pytree.tree_flatten_with_path(tree)[0]]

    @functools.cached_property
    def batch_size(self) -> int:
        """Dimension 0 of the first tensor that is split, or of the first tensor at all.

        The number of given microbatches; 1 for one of them.
        """
        if self.is_whole:
            return len(self.parts)
        for leaf, split in zip(self.leaves, self.split or [True] * len(self.leaves), strict=True):
            if split and isinstance(leaf, Tensor) and leaf.ndim:
                return leaf.shape[0]
        raise InputError(
            "pipec needs a batch to split: no argument is a tensor with at least one dimension. "
            "Pass the inputs of the whole mini-batch to step()."
        )

    @functools.cached_property
    def num_elements(self) -> int:
        """The number of elements of all tensors together."""
        return sum(leaf.numel() for leaf in self.leaves if isinstance(leaf, Tensor))

    def check(self, model: nn.Module) -> None:
        """Raise InputError unless the model's ``forward`` takes these arguments. A hook may change them."""
        if has_forward_pre_hooks(model):
            return
        taken = inspect.signature(model.forward)
        try:
            taken.bind(*self.args, **self.kwargs)
        except TypeError as error:
            raise InputError(f"{type(model).__name__}.forward{taken} cannot be called so: {error}") from None

    def signature(self, variables: Sequence[Variable] = ()) -> Hashable:
        """What a compilation depends on: calls with equal signatures can share one.

        It has the structure of the arguments, the plain values among them, and the dtype, layout and shape of
        every tensor, without the size of the batch and with the names of ``variables`` in place of theirs.

        Raises:
            InputError: an argument is neither a tensor nor a plain value.
        """
        names: dict[int, dict[int | None, str]] = {}
        for variable in variables:
            names.setdefault(variable.position, {})[variable.dim] = variable.name
        named = [names.get(position, {}) for position in range(len(self.leaves))]
        kinds = tuple(map(_kind, self.leaves, self.axes, self.paths, named))
        return str(pytree.tree_structure(self.tree)), kinds, self.strided, self.keyword_order, self.repeated

    def with_batch_first(self, rows: int) -> "ModelCall":
        """The call with its ``rows`` in front, which it has where ``split`` says.

        Rows of a contiguous tensor are made contiguous, for ``forward`` may view them; others keep their
        strides.

        Raises:
            InputError: rows are merged with others in a tensor that is not contiguous.
        """
        if all(axis is None or axis.is_leading for axis in self.axes):
            return self
        moved = [(k, axis) for k, axis in enumerate(self.axes) if axis and not axis.is_leading]
        strided = tuple(k for k, _ in moved if not self.leaves[k].is_contiguous())
        for position, axis in moved:
            if axis.num_merged and position in strided:
                path = self.paths[position]
                raise InputError(
                    f"{path} is not contiguous, and has the rows of the batch merged with others: its "
                    f"microbatches would be laid out otherwise. Pass {path}.contiguous()"
                )
        leaves = [
            leaf if axis is None or axis.is_leading else _rows_first(leaf, axis, rows)
            for leaf, axis in zip(self.leaves, self.axes, strict=True)
        ]
        args, kwargs, target = self.with_leaves(leaves)
        return replace(self, args=args, kwargs=kwargs, target=target, strided=strided)

    def in_order_for(self, model: nn.Module) -> "ModelCall":
        """The call with the ``keyword_order`` that ``model`` may ask for."""
        parameters = inspect.signature(model.forward).parameters.values()
        takes_dict = any(x.kind is x.VAR_KEYWORD for x in parameters)
        named = {x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)}
        others = [name for name in self.kwargs if name not in named]
        is_asked = takes_dict and others != sorted(others)
        return replace(self, keyword_order=tuple(others)) if is_asked else self

    def with_leaves(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Arguments, keyword arguments and target that have these leaves in the place of its own."""
        made: tuple[Any, ...] = pytree.tree_unflatten(leaves, pytree.tree_structure(self.tree))
        args, kwargs, target = made
        return args, kwargs, target

    def check_target(self, needed: bool) -> None:
        """Raise InputError if the target is missing, or has other rows than the batch."""
        if needed and self.target is None:
            raise InputError(
                "target is missing: this pipeline has a loss_fn(output, target); pass target=..."
            )
        size, target = self.batch_size, self.target
        if not self.is_whole and isinstance(target, Tensor) and target.ndim and target.shape[0] != size:
            raise TargetRowsError(
                f"target has {target.shape[0]} rows but the batch has {size}. Pass as many, or tell "
                "pipec.compile where they are: batched={'target': 1} if dimension 1 is the batch, or "
                "{'target': '(t b)'} if dimension 0 is time and batch in one. If the batch cannot be split, "
                "as merged graphs cannot, pass a list of such batches: step(microbatches=[...])"
            )

    @functools.cached_property
    def axes(self) -> tuple[BatchAxis | None, ...]:
        """Where the user has the batch, for each leaf; None if it is whole."""
        if self.split is not None:
            return self.split
        size = self.batch_size
        return tuple(
            LEADING if isinstance(x, Tensor) and x.ndim > 0 and x.shape[0] == size else None
            for x in self.leaves
        )

    @functools.cached_property
    def batched(self) -> Sequence[bool]:
        """Whether each leaf is split."""
        return [axis is not None for axis in self.axes]

    def rows(self, start: int, stop: int) -> "ModelCall":
        """The call on some rows of the batch. Its tensors are views of this one's.

        Of given microbatches it is one of them.
        """
        if self.given:
            assert stop == start + 1
            return self.given[start]
        flags = iter(self.batched)
        return self.map(lambda leaf: leaf[start:stop] if next(flags) else leaf)

    def sample(self, num_rows: int, device: torch.device | None) -> "ModelCall":
        """A call of the same structure and layout with ``num_rows`` rows and undefined values.

        Its tensors are on ``device``, or on the devices of this call's tensors if that is None.
        """
        flags = iter(self.batched)

        def like(leaf: Any) -> Any:
            batched = next(flags)
            if not isinstance(leaf, Tensor):
                return leaf
            shape = (num_rows, *leaf.shape[1:]) if batched else leaf.shape
            kind: Any = {"dtype": leaf.dtype, "device": device or leaf.device}
            if leaf.is_contiguous():
                return torch.empty(shape, **kind)
            return torch.empty_strided(shape, leaf.stride(), **kind)

        return self.map(like)

    def map(self, function: Callable[[Any], Any]) -> "ModelCall":
        """Apply ``function`` to every leaf, in order. Split leaves stay split."""
        args, kwargs, target = pytree.tree_map(function, self.tree)
        return replace(self, args=args, kwargs=kwargs, target=target, split=self.axes)


def _rows_first(leaf: Tensor, axis: BatchAxis, rows: int) -> Tensor:
    rows_first: Tensor = axis.rows_first(leaf, rows)
    return rows_first.contiguous() if leaf.is_contiguous() else rows_first


def refuse_input_gradients(call: ModelCall) -> None:
    """Raise InputError if an argument requires a gradient, which no step computes."""
    for path, leaf in zip(call.paths, call.leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise InputError(
                f"{path} requires a gradient, but pipec computes gradients of parameters alone; "
                f"pass it detached, or make it a parameter of the model"
            )


def plain_name(path: str) -> str:
    """``kwargs['input_ids']`` as ``kwargs_input_ids``, which is also what a front end makes of it."""
    return re.sub(r"[\W_]+", "_", path).strip("_").removeprefix("L_")


def _kind(leaf: Any, axis: BatchAxis | None, path: str, names: Mapping[int | None, str]) -> Hashable:
    if isinstance(leaf, Tensor):
        shape = [names.get(dim, size) for dim, size in enumerate(leaf.shape)]
        return leaf.dtype, tuple(shape[axis is not None :]), axis, _layout(leaf, bool(names))
    if not _is_plain(leaf):
        raise InputError(
            f"{path} is a {type(leaf).__module__}.{type(leaf).__qualname__}, which no stage can take; "
            "pass tensors, numbers, strings and None, in tuples, lists, dicts or classes registered with "
            "torch.export.register_dataclass"
        )
    value = repr(leaf) if isinstance(leaf, float | complex) else leaf  # 0.0 equals -0.0, and NaN not itself
    return type(leaf), names.get(None, value)


def _layout(tensor: Tensor, is_general: bool) -> Hashable:
    """The memory layout of a tensor. With variables, strides differ from call to call."""
    if tensor.is_contiguous():
        return None
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tuple(order) if is_general else tensor.stride()


def _is_plain(leaf: Any) -> bool:
    """Whether a value is the same in every microbatch. An object that holds tensors may have a batch."""
    try:
        hash(leaf)
    except TypeError:
        return False
    return not _holds_tensors(leaf, depth=4)


def _holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return True
    held = {} if isinstance(value, type) else dict(getattr(value, "__dict__", {}))
    return depth > 0 and any(_holds_tensors(x, depth - 1) for x in pytree.tree_leaves(held))


def whole_microbatch(call: ModelCall) -> ModelCall:
    """A microbatch, every tensor of which is whole and contiguous: the layout may differ from others'."""
    whole = replace(call, split=(None,) * len(call.leaves))
    return whole.map(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf)


def call_of_microbatches(microbatches: Sequence[ModelCall], weights: tuple[float, ...]) -> ModelCall:
    """The call of a step in given microbatches: that of the largest, with all of them.

    Raises:
        InputError: microbatches differ in more than sizes and numbers.
    """
    for number, microbatch in enumerate(microbatches):
        if found := _difference(microbatch, microbatches[0]):
            raise InputError(
                f"microbatches[{number}] is not like microbatches[0]: {found}. Microbatches of a step differ "
                "in sizes, values and numbers alone; pass others in a step of their own"
            )
    largest = max(microbatches, key=lambda each: each.num_elements)
    return replace(largest, given=tuple(microbatches), weights=weights)


def _difference(call: ModelCall, first: ModelCall) -> str:
    """How a microbatch differs from the first in what all have in common; empty if it does not."""
    if pytree.tree_structure(call.tree) != pytree.tree_structure(first.tree):
        other = sorted({*call.paths} ^ {*first.paths})
        return f"{other[0]} is in one of them alone" if other else "its arguments are nested otherwise"
    for place, (leaf, other) in enumerate(zip(call.leaves, first.leaves, strict=True)):
        if _fixed_part(leaf) != _fixed_part(other):
            return f"{call.paths[place]} is {_described(leaf)}, and {_described(other)} there"
    if call.keyword_order != first.keyword_order:
        return "keyword arguments have another order, for which forward() may ask"
    if call.repeated != first.repeated:
        return "other arguments of it are one tensor"
    return ""


def _fixed_part(leaf: object) -> object:
    """What all microbatches of a step have in common in an argument: all but sizes and numbers."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.ndim, leaf.device
    may_vary = type(leaf) is int or (type(leaf) is float and math.isfinite(leaf))
    return type(leaf) if may_vary else (type(leaf), repr(leaf))


def _described(leaf: object) -> str:
    if isinstance(leaf, Tensor):
        dims = f"{leaf.ndim} dimension{'s' * (leaf.ndim != 1)}"
        return f"{str(leaf.dtype).removeprefix('torch.')} of {dims} on {leaf.device}"
    return f"the {type(leaf).__name__} {short_repr(leaf)}"
