"""Divide the phases of stages into segments, between which model collectives run.

::

    h = mm(x, w)           part 0            h = mm(x, w)           part 0
    a = all_gather(h)      part 0     ->     a = all_gather(h)      part 1
    s = mm(h, a)           part 0            s = mm(h, a)           part 1

A collective waits for other replicas, and no function does: one hands over its value at its end, and the next
is given what comes of it.
"""

from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from pipec.graph import TrainingGraph, is_collective, is_constant, is_forward, segment_of, stage_of


@dataclass(frozen=True)
class SplitAtCollectives:
    """A part begins with a collective that needs something of the part before it. Nodes stay in order."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        reached: dict[tuple[int, bool], int] = defaultdict(int)
        for node in graph.nodes:
            if is_constant(node):
                continue
            place = stage_of(node), is_forward(node)
            if is_collective(node):
                reached[place] = max(reached[place], 1 + _part_in(place, node.all_input_nodes[0]))
            if reached[place]:
                node.meta["segment"] = reached[place]
        return graph


def _part_in(place: tuple[int, bool], node: fx.Node) -> int:
    """The part in which a value is made, 0 if it is there before the phase."""
    if node.op == "placeholder" or is_constant(node) or (stage_of(node), is_forward(node)) != place:
        return 0
    return segment_of(node)
