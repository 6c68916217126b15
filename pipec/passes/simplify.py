"""Remove what computes nothing, such as the two transposes around every weight that differentiation leaves.

::

    a = t(w)                         i = arange(12)                        x = mm(a, b)
    b = t(a)                         j = i + 0                             y = view(x, [b, 12, 8])
    y = mm(x, b)                     k = expand(j, [-1])                   z = view(y, [-1, 8])

    y = mm(x, w)                     i = arange(12)                        z = view(x, [12*b, 8])

    s = sum(dy, [0], True)
    g = view(s, [8])          ->     g = sum(dy, [0])

Models write such code where it serves other cases: an offset of zero, a mask that hides nothing, a shape that
is known. Here the case is known. Every value keeps its bits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pipec.graph import (
    TrainingGraph,
    has_data_dependent_size,
    is_check,
    is_constant,
    is_tensor,
    storage_owner,
)

aten = torch.ops.aten

SHAPED = (aten.view.default, aten.expand.default)
"""What takes the shape of its result, in which -1 may stand for a size."""

SCALAR_OVERLOADS: Mapping[Any, Any] = {
    aten._unsafe_view.default: aten.view.default,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
}
"""Operators that do nothing but call another one."""

ONES = {aten.ones.default, aten.new_ones.default, aten.ones_like.default}

Rewrite = Callable[[fx.Node], fx.Node | None]
"""The node that has the value of another one already, if there is one."""


@dataclass(frozen=True)
class Simplify:
    """Every node that is removed saves a call per microbatch and a line to read."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        known: dict[str, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "call_function" and is_tensor(node):
                if not has_data_dependent_size(node):
                    _write_out(node)
                _skip_reshape(node)
                _drop_dimensions(node)
                same = next(filter(None, (rule(node) for rule in REWRITES)), None)
                same = same or _computed_before(node, known)
                if same is not None and not (same.op == "placeholder" and _is_result(node)):
                    node.replace_all_uses_with(same)
        for node in reversed(list(graph.nodes)):
            if not node.users and node.op == "call_function" and not is_check(node):
                graph.module.graph.erase_node(node)
        return graph


def _write_out(node: fx.Node) -> None:
    """``view(x, [-1, 8])`` is ``view(x, [12*b, 8])``, and the last of three dimensions is number 2."""
    if len(node.args) == 2 and not node.kwargs:
        node.target = SCALAR_OVERLOADS.get(node.target, node.target)
    if node.target in SHAPED:
        node.args = (node.args[0], [_size(size) for size in node.meta["val"].shape])
    if node.target is aten.slice.Tensor and isinstance(node.args[1], int) and node.args[1] < 0:
        node.args = (node.args[0], node.args[1] + node.meta["val"].dim(), *node.args[2:])


def _skip_reshape(node: fx.Node) -> None:
    """Read what a view is of, if nobody else reads that view."""
    source = node.args[0] if node.target is aten.view.default else None
    if isinstance(source, fx.Node) and source.target is aten.view.default and len(source.users) == 1:
        node.args = (source.args[0], *node.args[1:])


def _drop_dimensions(node: fx.Node) -> None:
    """``view(sum(x, [0], True), [8])`` is ``sum(x, [0])``, if nobody else reads the sum."""
    total = node.args[0] if node.target is aten.view.default else None
    if not isinstance(total, fx.Node) or total.target is not aten.sum.dim_IntList or len(total.users) > 1:
        return
    if any(total.meta[key] != node.meta[key] for key in ("operator", "phase")):
        return
    summed, dims = total.args[:2]
    shape = total.meta["val"].shape
    gone = {dim % len(shape) for dim in dims or range(len(shape))}  # type: ignore[union-attr, operator]
    left = [size for dim, size in enumerate(shape) if dim not in gone]
    if total.args[2:] == (True,) and not total.kwargs and str(left) == str([*node.meta["val"].shape]):
        node.target, node.args = total.target, (summed, dims)


def _undone(node: fx.Node) -> fx.Node | None:
    """A transposition of the same one."""
    if node.target not in (aten.t.default, aten.transpose.int):
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.target is not node.target or not _same_dims(node, source):
        return None
    return source.all_input_nodes[0]


def _same_dims(one: fx.Node, other: fx.Node) -> bool:
    """Whether two transpositions swap the same dimensions, which may be counted from the end."""
    rank = one.meta["val"].dim()
    return {dim % rank for dim in one.args[1:]} == {dim % rank for dim in other.args[1:]}


def _whole(node: fx.Node) -> fx.Node | None:
    """A view of everything, in the shape that it has."""
    if node.target not in (*SHAPED, aten.slice.Tensor) or node.args[4:] not in ((), (1,)):
        return None
    return _if_alike(node.args[0], node, strides=False)


def _copied(node: fx.Node) -> fx.Node | None:
    """A copy of what nobody writes to, or a gradient that is put into zeros of its own size."""
    if node.target not in (aten.clone.default, aten.slice_backward.default) or _is_result(node):
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or storage_owner(source).op == "placeholder":
        return None
    return _if_alike(source, node, strides=True)


def _neutral(node: fx.Node) -> fx.Node | None:
    """``i + 0`` of integers, for minus zero plus zero is zero, ``x * 1``, ``x ** 1``, or no padding."""
    if node.target is aten.constant_pad_nd.default and not any(node.args[1]):  # type: ignore[arg-type]
        return _if_alike(node.args[0], node, strides=True)
    if node.kwargs or len(node.args) != 2 or isinstance(node.args[1], fx.Node | bool | complex):
        return None
    sums = node.target in (aten.add.Tensor, aten.sub.Tensor) and not node.meta["val"].dtype.is_floating_point
    product = node.target in (aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar)
    neutral = (sums and node.args[1] == 0) or (product and node.args[1] == 1)
    return _if_alike(node.args[0], node, strides=True) if neutral else None


def _hides_nothing(node: fx.Node) -> fx.Node | None:
    """``mask & True``"""
    if node.target not in (aten.bitwise_and.Tensor, aten.logical_and.default):
        return None
    for mask, other in (node.args, node.args[::-1]):
        if isinstance(mask, fx.Node) and mask.target in ONES and mask.meta["val"].dtype is torch.bool:
            return _if_alike(other, node, strides=False)
    return None


REWRITES: Sequence[Rewrite] = (_undone, _whole, _copied, _neutral, _hides_nothing)


def _computed_before(node: fx.Node, known: dict[str, fx.Node]) -> fx.Node | None:
    """The constant that is the same. Each stage computes those that it reads, so that none is sent for it."""
    if not is_constant(node):
        return None
    first = known.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
    return first if first is not node else None


def _is_result(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _if_alike(source: Any, node: fx.Node, strides: bool) -> fx.Node | None:
    """``source``, if it is a tensor of the same type, shape and device, and lies in memory alike.

    Sizes may be symbols, and are compared as text.
    """
    if not isinstance(source, fx.Node) or not is_tensor(source):
        return None
    return source if _type(source.meta["val"], strides) == _type(node.meta["val"], strides) else None


def _type(value: Tensor, strides: bool) -> tuple[object, ...]:
    return value.dtype, value.device, str(value.shape), str(value.stride()) if strides else ""


def _size(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
