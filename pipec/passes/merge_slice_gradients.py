"""Make the gradient of a tensor that was sliced by one stack or cat.

Differentiation makes zeros for each index or slice, writes its gradient into them, and adds the results::

    a = select_backward(g1, [2, 4], 0, 1)
    b = select_backward(g0, [2, 4], 0, 0)      ->      c = stack([g0, g1])
    c = a + b

    a = slice_backward(g0, [4], 0, 0, 2, 1)
    b = slice_backward(g1, [4], 0, 2, 4, 1)    ->      a = cat([g0, g1])
    c = d + a                                          e = d + a
    e = c + b
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from pipec.graph import TrainingGraph, is_gradient_sum
from pipec.torch_compat.run_time import OpOverload

SELECT, SLICE = torch.ops.aten.select_backward.default, torch.ops.aten.slice_backward.default
MERGED_BY: Mapping[object, OpOverload] = {
    SELECT: torch.ops.aten.stack.default,
    SLICE: torch.ops.aten.cat.default,
}


@dataclass(frozen=True)
class MergeSliceGradients:
    """Replace sums that add the gradients of all slices of a dimension one after the other.

    The terms of every element are added in the same order as before.
    """

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for total in reversed(list(graph.nodes)):
            rest, slices = _slices_of(total)
            if slices:
                _merge(total, rest, slices)
        for node in reversed(list(graph.nodes)):
            if not node.users and (node.target in MERGED_BY or is_gradient_sum(node)):
                graph.module.graph.erase_node(node)
        return graph


def _slices_of(total: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """The gradients of all slices that the last additions of a sum add, and the term they are added to.

    The term is None if the sum has no other; the list is empty if slices are missing.
    """
    node, slices = total, list[fx.Node]()
    while (
        is_gradient_sum(node) and len(node.all_input_nodes) == 2 and (node is total or len(node.users) == 1)
    ):
        terms = sorted(node.all_input_nodes, key=_is_slice)
        slices.append(terms.pop())
        (node,) = terms
        if _cover_dimension([*slices, node]):
            return None, [*slices, node]
        if _cover_dimension(slices):
            return node, slices
        if not _is_slice(slices[-1]):
            break
    return None, []


def _merge(total: fx.Node, rest: fx.Node | None, slices: list[fx.Node]) -> None:
    """Let readers of ``total`` read ``rest`` plus the merged slices, if the strides are the same."""
    gradients = [each.args[0] for each in sorted(slices, key=_bounds)]
    target, dimension = MERGED_BY[slices[0].target], slices[0].args[2]
    merged_value = target([each.meta["val"] for each in gradients], dimension)  # type: ignore[union-attr]
    value = merged_value if rest is None else rest.meta["val"] + merged_value
    if str(value.stride()) != str(total.meta["val"].stride()):
        return
    nodes = total.graph
    with nodes.inserting_before(total):
        merged = nodes.create_node("call_function", target, (gradients, dimension))
        merged.meta = {**total.meta, "val": merged_value}
        if rest is not None:
            merged = nodes.create_node("call_function", total.target, (rest, merged))
            merged.meta = dict(total.meta)
    total.replace_all_uses_with(merged)


def _is_slice(node: fx.Node) -> bool:
    return node.target in MERGED_BY and len(node.users) == 1


def _bounds(part: fx.Node) -> tuple[int, int]:
    """The start and end of the slice in its dimension."""
    size, start = part.meta["val"].shape[part.args[2]], part.args[3]
    return (start, start + 1) if part.target is SELECT else (start, min(part.args[4], size))  # type: ignore


def _cover_dimension(slices: list[fx.Node]) -> bool:
    """Whether these are gradients of slices that cover one dimension exactly once.

    Symbolic bounds, such as those of ``table[:t]``, cannot be ordered.
    """
    if len(slices) < 2 or any(not _is_slice(each) or each.args[5:] not in ((), (1,)) for each in slices):
        return False
    if any(not isinstance(bound, int) for each in slices for bound in each.args[3:5]):
        return False
    properties = {(each.target, each.args[2], each.meta["val"].dtype) for each in slices}
    size = slices[0].meta["val"].shape[slices[0].args[2]]
    if len(properties) != 1 or not isinstance(size, int):
        return False
    ends = [0]
    for start, end in sorted(map(_bounds, slices)):
        if start != ends[-1]:
            return False
        ends.append(end)
    return ends[-1] == size
