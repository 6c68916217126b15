"""Call products with transposed weights as models do, instead of a product of views.

::

    a = view(x, [128*b, 64])
    c = t(w)
    d = addmm(bias, a, c)          ->      y = linear(x, w, bias)
    y = view(d, [b, 128, 256])

Such is what torch makes of this call. It has the same bits, and makes the views without Python.
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

aten = torch.ops.aten
VIEW = aten.view.default


@dataclass(frozen=True)
class RecomposeLinear:
    """Of the forward alone. It comes last: what other passes know of are ``mm`` and ``addmm``."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for node in list(graph.nodes):
            if _is_linear(node):
                _call(node)
        return graph


def _is_linear(node: fx.Node) -> bool:
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs or not is_forward(node):
        return False
    if reuses_memory(node):
        return False  # linear takes no memory for its value
    *bias, _, weight = node.args
    is_plain = all(each.meta["val"].dim() == 1 for each in bias)  # type: ignore[union-attr]
    return is_plain and isinstance(weight, fx.Node) and weight.target is aten.t.default


def _call(product: fx.Node) -> None:
    """Let the product's node be ``linear``, and take the place of the views around it.

    It keeps its name, by which passes are told what is computed again, and has the cost of all.
    """
    *bias, rows, transposed = product.args
    leading = _leading(product, rows)  # type: ignore[arg-type]
    made = product.meta["val"]
    given: Any = rows
    if leading:
        made = VIEW(made, [*leading, made.shape[-1]])
        given = _with_leading(product, rows, leading)  # type: ignore[arg-type]
    product.target, product.meta["val"] = aten.linear.default, made
    product.args = (given, transposed.args[0], *bias)  # type: ignore[union-attr]
    for view in list(product.users):
        if view.target is VIEW and str(view.meta["val"].shape) == str(made.shape):
            view.replace_all_uses_with(product)
    for node in (*product.users, rows, transposed):
        assert isinstance(node, fx.Node)
        if not node.users and node.op == "call_function" and not is_check(node):
            product.meta["cost"] = _with_view(product.meta["cost"], node.meta["cost"])
            product.graph.erase_node(node)


def _with_view(cost: OperatorCost, view: OperatorCost) -> OperatorCost:
    """The cost of a product that makes a view as well, which takes time only where that was measured."""
    if cost.measured is None or view.measured is None:
        return cost
    return replace(
        cost, measured=replace(cost.measured, seconds=cost.measured.seconds + view.measured.seconds)
    )


def _leading(product: fx.Node, rows: fx.Node) -> Sequence[Any]:
    """The two dimensions that are one in a product, if its rows are a view and its readers are; or none.

    Torch takes another way with three dimensions unless they lie in memory one after the other.
    """
    if (
        rows.target is not VIEW
        or has_data_dependent_size(product)
        or any(user.target is not VIEW for user in product.users)
    ):
        return ()
    source: fx.Node = rows.args[0]  # type: ignore[assignment]
    if _is_rows(source, rows) and is_contiguous(source):
        leading: Sequence[Any] = source.meta["val"].shape[:-1]
        return leading
    if is_contiguous(rows) and [user for user in rows.users if is_forward(user)] == [product]:
        shown = (user.meta["val"].shape[:-1] for user in product.users if _is_rows(user, product))
        return next(shown, ())
    return ()


def _is_rows(node: fx.Node, flat: fx.Node) -> bool:
    """Whether a value is that of two dimensions, but for that its rows have two themselves."""
    shape = node.meta["val"].shape
    return len(shape) == 3 and str(shape[-1]) == str(flat.meta["val"].shape[-1])


def _with_leading(product: fx.Node, rows: fx.Node, leading: Sequence[Any]) -> fx.Node:
    """The rows in three dimensions: what they are a view of, or another view of that."""
    source: fx.Node = rows.args[0]  # type: ignore[assignment]
    shape = [*leading, rows.meta["val"].shape[-1]]
    if str([*source.meta["val"].shape]) == str(shape):
        return source
    sizes = [size.node.expr if isinstance(size, torch.SymInt) else size for size in shape]
    view = rows
    if len(rows.users) > 1:
        with product.graph.inserting_before(product):
            view = product.graph.call_function(VIEW)
    view.args, view.meta = (source, sizes), {**rows.meta, "val": VIEW(rows.meta["val"], shape)}
    return view
