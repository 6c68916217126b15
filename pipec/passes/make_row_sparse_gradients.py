"""Compute only the rows of a large embedding's gradient that a microbatch looked up.

::

    dw = embedding_dense_backward(dy, tokens, 50257, -1, False)
    return ..., (..., dw, ...)

    -> dw = embedding_row_gradient(dy, tokens, 50257, -1, False)    added to these rows of the sum

The whole gradient has the size of the table, is nearly all zeros, and would be written, read and added for
every microbatch. The sum keeps its bits: rows are added in the same order, and adding zeros changes nothing.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from pipec.cost.formulas import OperatorCost, node_bytes
from pipec.graph import Gradient, Parameter, TrainingGraph

MIN_RATIO = 2
"""The smallest ratio of the rows of a large table to the rows that a microbatch looks up."""

MIN_BYTES = 1 << 20
"""The smallest large table. Zeros of a smaller one take less time than finding the distinct rows."""


@dataclass(frozen=True)
class MakeRowSparseGradients:
    """Mark the embedding gradients that are a large table's whole gradient and have its dtype."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for node in _exclusive_gradients(graph):
            if not node.meta.get("row_sparse") and _is_large(node, graph.batch_size):
                node.meta["row_sparse"] = True
                node.meta["cost"] = _row_sparse_cost(node)
        return graph


def _exclusive_gradients(graph: TrainingGraph) -> Iterator[fx.Node]:
    """Yield the values that are one parameter's whole gradient, have its dtype, and have no other reader."""
    results = Counter(node for _, node in graph.outputs)
    arguments = {node.meta["role"]: node for node in graph.arguments}
    for role, node in graph.outputs:
        if (
            isinstance(role, Gradient)
            and results[node] == len(node.users) == 1
            and node.meta["val"].dtype == arguments[Parameter(role.fqn)].meta["val"].dtype
        ):
            yield node


def _is_large(gradient: fx.Node, size: int) -> bool:
    if gradient.target is not torch.ops.aten.embedding_dense_backward.default:
        return False
    whole = node_bytes(gradient, size)
    return whole >= MIN_BYTES and whole >= MIN_RATIO * node_bytes(_output_gradient(gradient), size)


def _output_gradient(gradient: fx.Node) -> fx.Node:
    """The gradient of the embedding's output."""
    incoming = gradient.args[0]
    assert isinstance(incoming, fx.Node)
    return incoming


def _row_sparse_cost(gradient: fx.Node) -> OperatorCost:
    """The cost of reading and summing rows, and of adding them to the sum of gradients.

    A measured time is dropped, because it is of the whole gradient.
    """
    cost: OperatorCost = gradient.meta["cost"]
    incoming: OperatorCost = _output_gradient(gradient).meta["cost"]
    return replace(cost, bytes_moved=6 * incoming.output_bytes, measured=None)
