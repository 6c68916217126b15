"""Moves the rows of the batch to the front of outputs in which a row is not one block.

::

    y = relu(x)              f32[7*b, 4], its rows 7 times in order          y = relu(x)
    return y                                                           ->    v = view(y, [7, b, 4])
                                                                             return permute(v, [1, 0, 2])

Such results of microbatches can be concatenated, and ``BatchAxis.restore`` turns the concatenation into the
batch's result.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from pipec.capture.graph_calls import INHERITED_META, fake_value
from pipec.capture.markers import OUTPUT_MERGE
from pipec.ir.batch_axis import BatchAxis
from pipec.torch_compat.symbolic_numbers import formula

_aten = torch.ops.aten


def mark_output_merge(result: fx.Node, unproven: str = "", axis: BatchAxis | None = None) -> fx.Node:
    """Mark a result of a captured graph as a sum, or with the axis of the batch.

    The graph is to return what this returns. With an ``axis``, the output of the batch has its rows in their
    order. ``unproven`` names the call after which it is not known how results of microbatches make that of
    the batch.
    """
    along = [] if axis is None else [axis.dim, axis.outer, axis.inner]
    with result.graph.inserting_before(result.graph.output_node()):  # behind all that writes into the result
        marked = result.graph.call_function(OUTPUT_MERGE, (result, unproven, along))
    marked.meta = {key: result.meta[key] for key in INHERITED_META if key in result.meta}
    return marked


def batch_first_output(marked: fx.Node, axis: BatchAxis, rows: Any) -> fx.Node:
    """The value of an ``OUTPUT_MERGE`` in a joint graph, its rows moved from ``axis`` to dimension 0.

    ``rows`` is a number or a symbolic size. How many blocks of them there are is told by the size of the
    dimension, which may be symbolic as well.
    """
    value = marked.all_input_nodes[0]
    sizes = (axis if axis.inner == 0 else replace(axis, outer=0)).unmerged_shape(
        fake_value(value).shape, rows
    )
    at = axis.dim + axis.has_outer
    order = [at, *(dim for dim in range(len(sizes)) if dim != at)]
    viewed = _call(marked, _aten.view.default, value, sizes)
    return _call(marked, _aten.permute.default, viewed, order)


def _call(marked: fx.Node, function: Any, value: fx.Node, numbers: Sequence[Any]) -> fx.Node:
    formulas = [*map(formula, numbers)]
    with marked.graph.inserting_before(marked):
        node = marked.graph.call_function(function, (value, formulas))
    node.meta = {key: marked.meta[key] for key in INHERITED_META if key in marked.meta}
    node.meta["val"] = function(fake_value(value), numbers)
    return node
