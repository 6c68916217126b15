"""Separate the nodes that make input gradients from the nodes that only make weight gradients.

::

    dx = mm(dy, w)        BACKWARD     ->     dx = mm(dy, w)        BACKWARD_INPUT
    dw = mm(dy.t(), x)    BACKWARD            dw = mm(dy.t(), x)    BACKWARD_WEIGHT

The backward of another operator, or another replica, waits for input gradients. The rest can run at any later
time (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2).
"""

import operator
from dataclasses import dataclass, replace

from torch import fx

from pipec.graph import LoweringLevel, TrainingGraph, is_collective, is_forward, send
from pipec.ir import Phase


@dataclass(frozen=True)
class SplitBackward:
    """Divide ``Phase.BACKWARD`` into its two halves. A fused backward runs both."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for node in reversed(list(graph.nodes)):
            if not is_forward(node):
                needed = (
                    node.target is send
                    or is_collective(node)
                    or any(_awaits(node, user) for user in node.users)
                )
                node.meta["phase"] = Phase.BACKWARD_INPUT if needed else Phase.BACKWARD_WEIGHT
        for node in graph.nodes:
            if node.target is operator.getitem:
                node.meta["phase"] = node.all_input_nodes[0].meta["phase"]
        return replace(graph, level=LoweringLevel.BACKWARD_SPLIT)


def _awaits(node: fx.Node, user: fx.Node) -> bool:
    if user.op == "output":
        return False
    return user.meta["phase"] is Phase.BACKWARD_INPUT or user.meta["operator"] != node.meta["operator"]
