"""Remove operators without effect, such as the two transposes that differentiation leaves at every weight.

::

    a = t(w)                         i = arange(12)                        x = mm(a, b)
    b = t(a)                         j = arange(12)                        y = view(x, [b, 12, 8])
    y = mm(x, b)                     k = expand(j, [-1])                   z = view(y, [-1, 8])

    y = mm(x, w)                     i = arange(12)                        z = view(x, [12*b, 8])

    s = sum(dy, [0], True)
    g = view(s, [8])          ->     g = sum(dy, [0])

Every value keeps its bits.
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
    is_forward,
    is_tensor,
    storage_owner,
)
from pipec.torch_compat.symbolic_numbers import formula

aten = torch.ops.aten

SHAPED = (aten.view.default, aten.expand.default)
"""Operators with the shape of the result as an argument, in which a size may be -1."""

SCALAR_OVERLOADS: Mapping[Any, Any] = {
    aten._unsafe_view.default: aten.view.default,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
}
"""Operators that only call another one, with that other."""

Rewrite = Callable[[fx.Node], fx.Node | None]
"""Returns a node that already has the value of the argument, or None."""


@dataclass(frozen=True)
class Simplify:
    """Remove nodes without effect. Each saves a call per microbatch and a line of generated code."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        constants: dict[str, fx.Node] = {}
        for node in graph.nodes:
            if node.op == "call_function" and is_tensor(node):
                if not has_data_dependent_size(node):
                    _normalize_arguments(node)
                _skip_reshape(node)
                _drop_dimensions(node)
                same = next(filter(None, (rule(node) for rule in REWRITES)), None)
                same = same or _equal_constant(node, constants)
                if same is not None and not (same.op == "placeholder" and _is_result(node)):
                    node.replace_all_uses_with(same)
        for node in reversed(list(graph.nodes)):
            if not node.users and node.op == "call_function" and not is_check(node):
                graph.module.graph.erase_node(node)
        _join_backwards(graph.module.graph)
        return graph


def _join_backwards(graph: fx.Graph) -> None:
    """Let the backward of an operator of which nothing is left in the forward join the operator behind it.

    The parameter that a custom function returned is then on the stage of its gradient.
    """
    calls = [node for node in graph.nodes if node.op == "call_function" and "operator" in node.meta]
    computing = {node.meta["operator"] for node in calls if is_forward(node)}
    for node in calls:
        if not is_forward(node) and node.meta["operator"] not in computing:
            sources = [x for x in node.all_input_nodes if x.op == "call_function" and not is_forward(x)]
            behind = [x.meta["operator"] for x in sources if "operator" in x.meta]
            node.meta["operator"] = min(behind, default=node.meta["operator"])


def _normalize_arguments(node: fx.Node) -> None:
    """Write sizes of -1 and negative dimensions out: ``view(x, [-1, 8])`` becomes ``view(x, [12*b, 8])``."""
    if len(node.args) == 2 and not node.kwargs:
        node.target = SCALAR_OVERLOADS.get(node.target, node.target)
    if node.target in SHAPED:
        node.args = (node.args[0], [formula(size) for size in node.meta["val"].shape])
    if node.target is aten.slice.Tensor and isinstance(node.args[1], int) and node.args[1] < 0:
        node.args = (node.args[0], node.args[1] + node.meta["val"].dim(), *node.args[2:])


def _skip_reshape(node: fx.Node) -> None:
    """Let a view of a view read the first view's source, if nothing else reads the first view."""
    source = node.args[0] if node.target is aten.view.default else None
    if isinstance(source, fx.Node) and source.target is aten.view.default and len(source.users) == 1:
        node.args = (source.args[0], *node.args[1:])


def _drop_dimensions(node: fx.Node) -> None:
    """``view(sum(x, [0], True), [8])`` is ``sum(x, [0])``, if nothing else reads the sum."""
    total = node.args[0] if node.target is aten.view.default else None
    if not isinstance(total, fx.Node) or total.target is not aten.sum.dim_IntList or len(total.users) > 1:
        return
    if any(total.meta[key] != node.meta[key] for key in ("operator", "phase")):
        return
    summed, dims = total.args[:2]
    shape = total.meta["val"].shape
    removed = {dim % len(shape) for dim in dims or range(len(shape))}  # type: ignore[union-attr, operator]
    left = [formula(size) for dim, size in enumerate(shape) if dim not in removed]
    keeps_dims = total.args[2:] == (True,) and not total.kwargs
    if keeps_dims and left == [*map(formula, node.meta["val"].shape)]:
        node.target, node.args = total.target, (summed, dims)


def _double_transpose(node: fx.Node) -> fx.Node | None:
    """``t(t(x))`` is ``x``."""
    if node.target not in (aten.t.default, aten.transpose.int):
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.target is not node.target or not _same_dims(node, source):
        return None
    return source.all_input_nodes[0]


def _same_dims(one: fx.Node, other: fx.Node) -> bool:
    """Whether two transposes swap the same dimensions, which may be counted from the end."""
    rank = one.meta["val"].dim()
    return {dim % rank for dim in one.args[1:]} == {dim % rank for dim in other.args[1:]}


def _whole_view(node: fx.Node) -> fx.Node | None:
    """A view or slice of the whole tensor in its own shape is the tensor."""
    if node.target not in (*SHAPED, aten.slice.Tensor) or node.args[4:] not in ((), (1,)):
        return None
    return _if_same_type(node.args[0], node, strides=False)


def _copy(node: fx.Node) -> fx.Node | None:
    """A copy of a value that nothing writes to is the value; so is a slice gradient of the full size."""
    if node.target not in (aten.clone.default, aten.slice_backward.default) or _is_result(node):
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or storage_owner(source).op == "placeholder":
        return None
    return _if_same_type(source, node, strides=True)


def _neutral_element(node: fx.Node) -> fx.Node | None:
    """``x * 1`` and ``x ** 1``, as in the gradient of a square."""
    is_product = node.target in (aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar)
    if not is_product or node.kwargs or node.args[1:] != (1,):
        return None
    return _if_same_type(node.args[0], node, strides=True)


REWRITES: Sequence[Rewrite] = (_double_transpose, _whole_view, _copy, _neutral_element)


def _equal_constant(node: fx.Node, constants: dict[str, fx.Node]) -> fx.Node | None:
    """An earlier equal constant. Merging adds no message: each stage computes the constants that it reads."""
    if not is_constant(node):
        return None
    first = constants.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
    return first if first is not node else None


def _is_result(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)


def _if_same_type(source: Any, node: fx.Node, strides: bool) -> fx.Node | None:
    """``source``, if it is a tensor of the same dtype, shape and device and, with ``strides``, strides.

    Sizes may be symbols, and are compared as text.
    """
    if not isinstance(source, fx.Node) or not is_tensor(source):
        return None
    return source if _type(source.meta["val"], strides) == _type(node.meta["val"], strides) else None


def _type(value: Tensor, strides: bool) -> tuple[object, ...]:
    layout = [formula(size) for size in (*value.shape, *(value.stride() if strides else ()))]
    return value.dtype, value.device, value.ndim, layout
