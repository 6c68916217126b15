"""Make no more of the gradient of a large table than the rows that a microbatch has looked up.

::

    dw = embedding_dense_backward(dy, tokens, 50257, -1, False)
    return ..., (..., dw, ...)

    -> dw = embedding_row_gradient(dy, tokens, 50257, -1, False)  which are added to the same rows of the sum

The whole gradient is the table's size, nearly all of it zeros, and is written, read and added for every
microbatch. Sums have the bits that they would have: rows are added up as that operator does, and zeros that
nobody adds change nothing.
"""

from dataclasses import dataclass, replace

import torch
from torch import fx

from pipec.cost.formulas import OperatorCost, node_bytes
from pipec.graph import TrainingGraph
from pipec.passes.exclusive_gradients import exclusive_gradients

LARGE = 2
"""A table is large if it has at least so many times the rows that a microbatch looks up, ..."""

LEAST_BYTES = 1 << 20
"""... and this size: zeros of a smaller one take less time than finding out which rows there are."""


@dataclass(frozen=True)
class MakeRowSparseGradients:
    """Mark gradients of embeddings that are a parameter's whole gradient, and of its own type."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for node in exclusive_gradients(graph):
            if not node.meta.get("row_sparse") and _is_large(node, graph.batch_size):
                node.meta["row_sparse"] = True
                node.meta["cost"] = _of_rows(node)
        return graph


def _is_large(gradient: fx.Node, size: int) -> bool:
    if gradient.target is not torch.ops.aten.embedding_dense_backward.default:
        return False
    whole = node_bytes(gradient, size)
    return whole >= LEAST_BYTES and whole >= LARGE * node_bytes(_incoming(gradient), size)


def _incoming(gradient: fx.Node) -> fx.Node:
    """The gradient of what was looked up."""
    incoming = gradient.args[0]
    assert isinstance(incoming, fx.Node)
    return incoming


def _of_rows(gradient: fx.Node) -> OperatorCost:
    """Rows are read, added up, and added to those of the sum. What was measured is of the whole gradient."""
    cost: OperatorCost = gradient.meta["cost"]
    incoming: OperatorCost = _incoming(gradient).meta["cost"]
    return replace(cost, bytes_moved=6 * incoming.output_bytes, measured=None)
