"""Let the gradient of a tensor that was taken apart be put together in one piece.

Differentiation makes zeros for each index or slice, writes its gradient into them, and adds them up::

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
from pipec.torch_compat import OpOverload

SELECT, SLICE = torch.ops.aten.select_backward.default, torch.ops.aten.slice_backward.default
MERGED_BY: Mapping[object, OpOverload] = {
    SELECT: torch.ops.aten.stack.default,
    SLICE: torch.ops.aten.cat.default,
}


@dataclass(frozen=True)
class MergeSliceGradients:
    """Replace sums of gradients to which all parts of a dimension are added one after the other.

    Every element keeps the order in which its terms are added.
    """

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for total in reversed(list(graph.nodes)):
            rest, parts = _parts_of(total)
            if parts:
                _merge(total, rest, parts)
        for node in reversed(list(graph.nodes)):
            if not node.users and (node.target in MERGED_BY or is_gradient_sum(node)):
                graph.module.graph.erase_node(node)
        return graph


def _parts_of(total: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """What parts are added to by the last additions of a sum, and the parts, if these are all there are."""
    node, parts = total, list[fx.Node]()
    while (
        is_gradient_sum(node) and len(node.all_input_nodes) == 2 and (node is total or len(node.users) == 1)
    ):
        terms = sorted(node.all_input_nodes, key=_is_part)
        parts.append(terms.pop())
        (node,) = terms
        if _make_up_all([*parts, node]):
            return None, [*parts, node]
        if _make_up_all(parts):
            return node, parts
        if not _is_part(parts[-1]):
            break
    return None, []


def _merge(total: fx.Node, rest: fx.Node | None, parts: list[fx.Node]) -> None:
    """Let readers of ``total`` read ``rest`` plus the parts in one piece, if that lies in memory alike."""
    gradients = [part.args[0] for part in sorted(parts, key=_span)]
    target, dimension = MERGED_BY[parts[0].target], parts[0].args[2]
    made = target([each.meta["val"] for each in gradients], dimension)  # type: ignore[union-attr]
    value = made if rest is None else rest.meta["val"] + made
    if str(value.stride()) != str(total.meta["val"].stride()):
        return
    nodes = total.graph
    with nodes.inserting_before(total):
        joined = nodes.create_node("call_function", target, (gradients, dimension))
        joined.meta = {**total.meta, "val": made}
        if rest is not None:
            joined = nodes.create_node("call_function", total.target, (rest, joined))
            joined.meta = dict(total.meta)
    total.replace_all_uses_with(joined)


def _is_part(node: fx.Node) -> bool:
    return node.target in MERGED_BY and len(node.users) == 1


def _span(part: fx.Node) -> tuple[int, int]:
    """Where the gradient stands in its dimension: from where and to where."""
    size, start = part.meta["val"].shape[part.args[2]], part.args[3]
    return (start, start + 1) if part.target is SELECT else (start, min(part.args[4], size))  # type: ignore


def _make_up_all(parts: list[fx.Node]) -> bool:
    """Whether these are gradients of all parts of one dimension, each once.

    A symbolic position has no place among others: that of ``table[:t]`` may lie anywhere.
    """
    if len(parts) < 2 or any(not _is_part(part) or part.args[5:] not in ((), (1,)) for part in parts):
        return False
    if any(not isinstance(position, int) for part in parts for position in part.args[3:5]):
        return False
    kinds = {(part.target, part.args[2], part.meta["val"].dtype) for part in parts}
    size = parts[0].meta["val"].shape[parts[0].args[2]]
    if len(kinds) != 1 or not isinstance(size, int):
        return False
    ends = [0]
    for start, end in sorted(map(_span, parts)):
        if start != ends[-1]:
            return False
        ends.append(end)
    return ends[-1] == size
