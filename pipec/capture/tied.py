"""Tied tensors: all names of one share one argument and one gradient."""

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from pipec.graph import ArgumentRole, ResultRole, is_gradient_sum


def merge_tied_arguments(graph: fx.Graph) -> None:
    """Let every user of a tied tensor read the same argument."""
    first: dict[ArgumentRole, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if first.setdefault(node.meta["role"], node) is not node:
            node.replace_all_uses_with(first[node.meta["role"]])
            graph.erase_node(node)


def merge_tied_gradients(graph: fx.Graph, results: Iterable[ResultRole]) -> tuple[ResultRole, ...]:
    """Sum the gradients of a tied parameter's names in the order of the graph, as autograd does."""
    output = graph.output_node()
    found: dict[ResultRole, list[fx.Node]] = {}
    for role, node in zip(results, output.args[0], strict=True):  # type: ignore[arg-type]
        found.setdefault(role, []).append(node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    for role, nodes in found.items():
        if len(nodes) > 1:
            terms = sorted((term for node in nodes for term in _terms(node)), key=order.__getitem__)
            found[role] = [_sum(graph, terms)]
    output.args = (tuple(node for [node] in found.values()),)
    for node in reversed(order):
        if not node.users and is_gradient_sum(node):
            graph.erase_node(node)
    return tuple(found)


def _terms(node: fx.Node) -> list[fx.Node]:
    if not is_gradient_sum(node):
        return [node]
    return [term for source in node.all_input_nodes for term in _terms(source)]


def _sum(graph: fx.Graph, terms: Sequence[fx.Node]) -> fx.Node:
    total = terms[0]
    for term in terms[1:]:
        with graph.inserting_after(term):
            dense_first = (term, total) if total.meta["val"].is_sparse else (total, term)
            partial = graph.call_function(torch.ops.aten.add.Tensor, dense_first)
        partial.meta = {key: dense_first[0].meta[key] for key in ("val", "phase")}
        partial.meta["operator"] = min(total.meta["operator"], term.meta["operator"])
        partial.meta["constant"] = False
        total = partial
    return total
