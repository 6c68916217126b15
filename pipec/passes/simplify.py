"""Remove transposes that undo each other. Differentiation leaves two around every weight of a linear layer.

::

    a = t(w)                    y = mm(x, w)
    b = t(a)           ->
    y = mm(x, b)
"""

from dataclasses import dataclass

import torch

from pipec.graph import TrainingGraph

TRANSPOSE = torch.ops.aten.t.default


@dataclass(frozen=True)
class Simplify:
    """Every node that is removed saves a call per microbatch and a line to read."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for node in list(graph.nodes):
            if node.target is TRANSPOSE:
                source = node.all_input_nodes[0]
                if source.target is TRANSPOSE:
                    node.replace_all_uses_with(source.all_input_nodes[0])
        for node in reversed(list(graph.nodes)):
            if node.target is TRANSPOSE and not node.users:
                graph.module.graph.erase_node(node)
        return graph
