"""Put what is joined, then permuted and copied, together in the order in which the copy has it.

::

    a = stack([q, k, v], 0)                      q' = permute(q, [0, 2, 1, 3])
    b = permute(a, [1, 3, 0, 2, 4])              k' = permute(k, [0, 2, 1, 3])
    c = clone(b, contiguous)             ->      v' = permute(v, [0, 2, 1, 3])
                                                 c = stack([q', k', v'], 2)

The gradient of queries, keys and values that are slices of one product is such a tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from pipec.graph import TrainingGraph, has_data_dependent_size

aten = torch.ops.aten

JOINS = (aten.stack.default, aten.cat.default)
SWAPS = (aten.t.default, aten.transpose.int)


@dataclass(frozen=True)
class PermuteBeforeConcat:
    """Every element is copied once instead of twice, where nothing else reads what was joined."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for copy in list(graph.nodes):
            joined, order = _permuted_concat(copy)
            if joined is not None and (replacement := _joined_in_order(copy, joined, order)) is not None:
                between = _views_between(copy, joined)
                copy.replace_all_uses_with(replacement)
                for node in (copy, *between, joined):
                    graph.module.graph.erase_node(node)
        return graph


def _permuted_concat(copy: fx.Node) -> tuple[fx.Node | None, list[int]]:
    """What is copied with its dimensions in another order, if that was joined for it alone; and the order."""
    if copy.target is not aten.clone.default or any(user.op == "output" for user in copy.users):
        return None, []
    order = list(range(copy.meta["val"].dim()))
    node = copy.args[0]
    while isinstance(node, fx.Node) and len(node.users) == 1 and (own := _order(node)):
        order = [own[dimension] for dimension in order]
        node = node.args[0]
    is_join = isinstance(node, fx.Node) and node.target in JOINS and len(node.users) == 1
    return (node if is_join and order != sorted(order) else None), order  # type: ignore[return-value]


def _order(node: fx.Node) -> list[int]:
    """The dimensions of its input that a view has, one after the other; none of another node."""
    rank = node.meta["val"].dim() if node.target in (aten.permute.default, *SWAPS) else 0
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [dimension % rank for dimension in node.args[1]]  # type: ignore[union-attr, operator, misc]
    if node.target in SWAPS and rank > 1:
        one, other = node.args[1:] or (0, 1)
        order[one], order[other] = order[other], order[one]  # type: ignore[index]
    return order


def _views_between(copy: fx.Node, joined: fx.Node) -> Sequence[fx.Node]:
    views, node = list[fx.Node](), copy.all_input_nodes[0]
    while node is not joined:
        views.append(node)
        node = node.all_input_nodes[0]
    return views


def _joined_in_order(copy: fx.Node, joined: fx.Node, order: Sequence[int]) -> fx.Node | None:
    """The parts with their dimensions in this order, joined, if that lies in memory as the copy does."""
    parts: Sequence[fx.Node] = joined.args[0]  # type: ignore[assignment]
    dimension: int = joined.args[1] if len(joined.args) > 1 else 0  # type: ignore[assignment]
    dimension %= len(order)
    own = order
    if joined.target is aten.stack.default:
        own = [each - (each > dimension) for each in order if each != dimension]
    if has_data_dependent_size(joined) or any(part.meta["val"].dim() != len(own) for part in parts):
        return None
    values = [aten.permute.default(part.meta["val"], own) for part in parts]
    value = joined.target(values, order.index(dimension))  # type: ignore[operator]
    wanted = copy.meta["val"]
    if value.dtype != wanted.dtype or str(value.stride()) != str(wanted.stride()):
        return None
    nodes = copy.graph

    def call(target: object, args: tuple[object, ...], value: object) -> fx.Node:
        with nodes.inserting_before(joined):
            node = nodes.create_node("call_function", target, args)  # type: ignore[arg-type]
        node.meta = {**joined.meta, "val": value}
        return node

    if list(own) != sorted(own):
        pairs = zip(parts, values, strict=True)
        parts = [call(aten.permute.default, (part, [*own]), each) for part, each in pairs]
    return call(joined.target, ([*parts], order.index(dimension)), value)
