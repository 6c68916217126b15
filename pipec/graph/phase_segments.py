"""Splits the nodes of a phase into its segments."""

import operator
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from pipec.graph import Gradient, TrainingGraph, is_collective, segment_of, send


def split_into_segments(
    graph: TrainingGraph, nodes: Sequence[fx.Node], gradients: Sequence[Collection[str]]
) -> list[set[fx.Node]]:
    """The nodes of a phase, in order, as the sets that its functions run; at least one.

    They are divided by ``meta["segment"]``, and then so that the ``gradients`` of each group are complete at
    the end of a function that computes nothing only the groups behind it need. A collective belongs to the
    segment behind it, so that there is always one before::

        dx2 = mm(dy, w2)                          0
        dw2 = mm(dy.t(), x2)      w2 | w1  ->     0
        dx1 = mm(dx2, w1)                         1
        dw1 = mm(dx2.t(), x1)                     1
    """
    groups = _first_groups(graph, nodes, gradients)
    keys = {node: (segment_of(node), groups[node]) for node in nodes}
    found = [{node for node in nodes if keys[node] == key} for key in sorted(set(keys.values()))]
    hands_over = [set[fx.Node]()] if found and any(map(is_collective, found[0])) else []
    return hands_over + found or [set()]


def _first_groups(
    graph: TrainingGraph, nodes: Sequence[fx.Node], gradients: Sequence[Collection[str]]
) -> Mapping[fx.Node, int]:
    """For each node the first group of ``gradients`` that needs it, or the last one if none does."""
    last = max(len(gradients) - 1, 0)
    group_of = {fqn: number for number, group in enumerate(gradients) for fqn in group}
    found = dict.fromkeys(nodes, last)
    for role, node in graph.outputs:
        if isinstance(role, Gradient) and node in found:
            found[node] = min(found[node], group_of.get(role.fqn, last))
    for node in reversed(nodes):
        found[node] = min([found[node], *(found[user] for user in node.users if user in found)])
    for node in nodes:
        if node.target in (operator.getitem, send):
            found[node] = found.get(node.all_input_nodes[0], found[node])
    return found
