"""Let the gradient of a tensor that was taken apart be put together in one piece.

Differentiation makes zeros for each slice, writes the slice's gradient into them, and adds them up::

    a = select_backward(g1, [2, 4], 0, 1)
    b = select_backward(g0, [2, 4], 0, 0)      ->      c = stack([g0, g1])
    c = a + b
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from pipec.graph import TrainingGraph, sums_gradients

SELECT = torch.ops.aten.select_backward.default
STACK = torch.ops.aten.stack.default


@dataclass(frozen=True)
class JoinSlices:
    """Replace sums of gradients that have one addend for each index of a dimension."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        nodes = graph.module.graph
        for total in reversed(list(nodes.nodes)):
            terms = list(_terms(total)) if sums_gradients(total) else []
            slices = {term.args[3]: term for term in terms if term.target is SELECT}
            if len(slices) == len(terms) and _make_up_all(list(slices.values())):
                gradients = [slices[index].args[0] for index in range(len(slices))]
                with nodes.inserting_before(total):
                    stacked = nodes.create_node("call_function", STACK, (gradients, terms[0].args[2]))
                stacked.meta = dict(total.meta)
                total.replace_all_uses_with(stacked)
        for node in reversed(list(nodes.nodes)):
            if not node.users and (node.target is SELECT or sums_gradients(node)):
                nodes.erase_node(node)
        return graph


def _terms(total: fx.Node) -> Iterator[fx.Node]:
    """What is added up, by sums that nobody else reads."""
    for term in total.all_input_nodes:
        if len(term.users) == 1 and sums_gradients(term):
            yield from _terms(term)
        else:
            yield term


def _make_up_all(slices: list[fx.Node]) -> bool:
    """Whether gradients of these slices, each of another index, are those of all slices of one tensor."""
    kinds = {(slice_.args[2], slice_.meta["val"].dtype) for slice_ in slices}
    if len(slices) < 2 or len(kinds) != 1:
        return False
    shape, dimension = slices[0].meta["val"].shape, slices[0].args[2]
    size = shape[dimension]
    indices = sorted(slice_.args[3] for slice_ in slices)  # type: ignore[type-var]
    return isinstance(size, int) and indices == list(range(size))
