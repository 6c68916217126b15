"""Splits the nodes of a phase into its segments."""

import operator
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from pipec.graph import Gradient, TrainingGraph, is_collective, segment_of, send


def split_into_segments(
    graph: TrainingGraph, nodes: Sequence[fx.Node], gradients: Sequence[Collection[str]]
) -> list[set[fx.Node]]:
    """The segments of a phase, in order: the set of nodes of each; at least one set.

    ``nodes`` are divided by ``meta["segment"]``, and then by groups of ``gradients``: the gradients of a
    group are complete at the end of its segment, which computes nothing that only later groups need. A
    collective is in the segment that reads its result; an empty segment precedes it if it would be first::

        dx2 = mm(dy, w2)                          0
        dw2 = mm(dy.t(), x2)      w2 | w1  ->     0
        dx1 = mm(dx2, w1)                         1
        dw1 = mm(dx2.t(), x1)                     1
    """
    groups = _first_groups(graph, nodes, gradients)
    keys = {node: (segment_of(node), groups[node]) for node in nodes}
    segments = [{node for node in nodes if keys[node] == key} for key in sorted(set(keys.values()))]
    before = [set[fx.Node]()] if segments and any(map(is_collective, segments[0])) else []
    return before + segments or [set()]


def _first_groups(
    graph: TrainingGraph, nodes: Sequence[fx.Node], gradients: Sequence[Collection[str]]
) -> Mapping[fx.Node, int]:
    """The first group of ``gradients`` that needs each node, or the last group if none needs it."""
    last = max(len(gradients) - 1, 0)
    group_of = {fqn: number for number, group in enumerate(gradients) for fqn in group}
    first = dict.fromkeys(nodes, last)
    for role, node in graph.outputs:
        if isinstance(role, Gradient) and node in first:
            first[node] = min(first[node], group_of.get(role.fqn, last))
    for node in reversed(nodes):
        first[node] = min([first[node], *(first[user] for user in node.users if user in first)])
    for node in nodes:
        if node.target in (operator.getitem, send):
            first[node] = first.get(node.all_input_nodes[0], first[node])
    return first
