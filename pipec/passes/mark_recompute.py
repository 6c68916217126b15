"""Decide which forward values a stage keeps for its backward and which it computes again.

::

    h = relu(x)            stage 1 FORWARD            h = relu(x)            stage 1 FORWARD, replayed
    g = gelu(h)            stage 1 FORWARD     ->     g = gelu(h)            stage 1 FORWARD, replayed
    dg = gelu_back(d, h)   stage 1 BACKWARD           dg = gelu_back(d, h)   stage 1 BACKWARD
"""

import operator
from dataclasses import dataclass

from torch import fx

from pipec.graph import TrainingGraph, is_collective, is_constant, is_forward, is_random, recv, send, stage_of


@dataclass(frozen=True)
class MarkRecompute:
    """Stages in ``stages``, or all if it is None, keep only what they received.

    That is what GPipe does (Huang et al. 2019, section 2.3). Values of random operators are kept as well,
    because drawn again they would differ, and so is what replicas have made together.
    """

    stages: frozenset[int] | None

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for node in filter(is_forward, graph.nodes):
            if not is_constant(node):
                kept = node.target in (send, recv) or is_collective(node) or _is_drawn(node)
                chosen = self.stages is None or stage_of(node) in self.stages
                node.meta["replay"] = chosen and not kept
        return graph


def _is_drawn(node: fx.Node) -> bool:
    """Whether the node is a random operator, or picks from the tuple that one returns."""
    return is_random(node.all_input_nodes[0] if node.target is operator.getitem else node)
