"""Divide the phases of stages into segments, between which model collectives run.

::

    h = mm(x, w)           segment 0            h = mm(x, w)           segment 0
    a = all_gather(h)      segment 0     ->     a = all_gather(h)      segment 1
    s = mm(h, a)           segment 0            s = mm(h, a)           segment 1

A collective waits for other replicas, and a phase function must not wait. So one segment ends by returning
the operand, and the next takes the result.
"""

from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from pipec.graph import TrainingGraph, is_collective, is_constant, is_forward, segment_of, stage_of


@dataclass(frozen=True)
class SplitAtCollectives:
    """Begin a segment with each collective that reads a value of the segment before. Nodes stay in order."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        latest: dict[tuple[int, bool], int] = defaultdict(int)
        for node in graph.nodes:
            if is_constant(node):
                continue
            phase = stage_of(node), is_forward(node)
            if is_collective(node):
                latest[phase] = max(latest[phase], 1 + _segment_in(phase, node.all_input_nodes[0]))
            if latest[phase]:
                node.meta["segment"] = latest[phase]
        return graph


def _segment_in(phase: tuple[int, bool], node: fx.Node) -> int:
    """The segment that makes a value; 0 if the value exists before the phase."""
    if node.op == "placeholder" or is_constant(node) or (stage_of(node), is_forward(node)) != phase:
        return 0
    return segment_of(node)
