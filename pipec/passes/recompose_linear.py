"""Replace a product with a transposed weight, and the views around it, by one call of ``linear``.

::

    a = view(x, [128*b, 64])
    c = t(w)
    d = addmm(bias, a, c)          ->      y = linear(x, w, bias)
    y = view(d, [b, 128, 256])

This undoes torch's decomposition of ``linear``. The bits are the same, and the views cost no Python calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from pipec.cost.formulas import OperatorCost
from pipec.graph import (
    TrainingGraph,
    has_data_dependent_size,
    is_check,
    is_contiguous,
    is_forward,
    reuses_memory,
)
from pipec.graph.size_text import size_formula

aten = torch.ops.aten
VIEW = aten.view.default


@dataclass(frozen=True)
class RecomposeLinear:
    """Recompose the forward alone. This pass runs last: the others know only ``mm`` and ``addmm``."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        views = _Views()
        for node in list(graph.nodes):
            if _is_linear(node):
                _recompose(node, views)
        return graph


class _Views:
    """Views of fake tensors. The values of equal blocks are the same ones, and are viewed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, value: torch.Tensor, shape: Sequence[Any]) -> torch.Tensor:
        key = id(value), *_formulas(shape)
        if key not in self._known:
            self._known[key] = value, VIEW(value, shape)  # the value is kept, so that its id stays its own
        return self._known[key][1]


def _is_linear(node: fx.Node) -> bool:
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs or not is_forward(node):
        return False
    if reuses_memory(node):
        return False  # linear has no out= argument
    *bias, _, weight = node.args
    is_plain = all(each.meta["val"].dim() == 1 for each in bias)  # type: ignore[union-attr]
    return is_plain and isinstance(weight, fx.Node) and weight.target is aten.t.default


def _recompose(product: fx.Node, views: _Views) -> None:
    """Turn the product's node into ``linear``, and remove the views around it.

    The node keeps its name, because ``MarkRecompute`` refers to nodes by name. Its cost includes the views.
    """
    *bias, rows, transposed = product.args
    leading = _leading_sizes(product, rows)  # type: ignore[arg-type]
    value = product.meta["val"]
    operand: Any = rows
    if leading:
        value = views(value, [*leading, value.shape[-1]])
        operand = _rows_in_three_dims(product, rows, leading, views)  # type: ignore[arg-type]
    product.target, product.meta["val"] = aten.linear.default, value
    product.args = (operand, transposed.args[0], *bias)  # type: ignore[union-attr]
    for view in list(product.users):
        if view.target is VIEW and _formulas(view.meta["val"].shape) == _formulas(value.shape):
            view.replace_all_uses_with(product)
    for node in (*product.users, rows, transposed):
        assert isinstance(node, fx.Node)
        if not node.users and node.op == "call_function" and not is_check(node):
            product.meta["cost"] = _with_view(product.meta["cost"], node.meta["cost"])
            product.graph.erase_node(node)


def _with_view(cost: OperatorCost, view: OperatorCost) -> OperatorCost:
    """The cost of a product plus that of a view, which takes time only if it was measured."""
    if cost.measured is None or view.measured is None:
        return cost
    return replace(
        cost, measured=replace(cost.measured, seconds=cost.measured.seconds + view.measured.seconds)
    )


def _leading_sizes(product: fx.Node, rows: fx.Node) -> Sequence[Any]:
    """The sizes of the two dimensions that views around the product flatten, or none.

    With an operand that is not contiguous, torch computes a three-dimensional ``linear`` in another way.
    """
    if (
        rows.target is not VIEW
        or has_data_dependent_size(product)
        or any(user.target is not VIEW for user in product.users)
    ):
        return ()
    source: fx.Node = rows.args[0]  # type: ignore[assignment]
    if _unflattens(source, rows) and is_contiguous(source):
        leading: Sequence[Any] = source.meta["val"].shape[:-1]
        return leading
    if is_contiguous(rows) and [user for user in rows.users if is_forward(user)] == [product]:
        unflattened = (user.meta["val"].shape[:-1] for user in product.users if _unflattens(user, product))
        return next(unflattened, ())
    return ()


def _unflattens(node: fx.Node, flat: fx.Node) -> bool:
    """Whether the node has three dimensions, of which ``flat`` flattens the first two."""
    shape = node.meta["val"].shape
    return len(shape) == 3 and _formulas(shape[-1:]) == _formulas(flat.meta["val"].shape[-1:])


def _formulas(shape: Sequence[Any]) -> list[Any]:
    return [size_formula(size) for size in shape]


def _rows_in_three_dims(product: fx.Node, rows: fx.Node, leading: Sequence[Any], views: _Views) -> fx.Node:
    """The operand with its ``leading`` sizes: the base of the view ``rows``, or another view of the base."""
    source: fx.Node = rows.args[0]  # type: ignore[assignment]
    shape = [*leading, rows.meta["val"].shape[-1]]
    sizes = _formulas(shape)
    if _formulas(source.meta["val"].shape) == sizes:
        return source
    view = rows
    if len(rows.users) > 1:
        with product.graph.inserting_before(product):
            view = product.graph.call_function(VIEW)
    view.args, view.meta = (source, sizes), {**rows.meta, "val": views(rows.meta["val"], shape)}
    return view
