"""Cuts the forward out of a training graph, where a capture without gradients would make the same graph."""

from dataclasses import replace

from pipec.graph import LossGradient, Output, TrainingGraph, UpdatedBuffer, is_branch_check, is_check
from pipec.graph.training_graph import copy_graph
from pipec.ir import Mode


def extract_forward(graph: TrainingGraph) -> TrainingGraph | None:
    """The graph of the loss alone, with nodes of its own; None if a capture might make another one.

    The code of the model is the same with and without gradients unless it asks for them, which
    ``depends_on_grad_mode`` says, and torch differentiates operators without changing what they compute.
    Graphs with collectives, a tail or branches on values, or that serve one number of rows, are captured
    again: what they are depends on the whole call.
    """
    if graph.depends_on_grad_mode or graph.first_collective or graph.findings.tail or graph.batch is None:
        return None
    if graph.input_branches.branches or any(map(is_branch_check, graph.nodes)):
        return None
    extracted = copy_graph(graph)
    results = [each for each in extracted.outputs if isinstance(each[0], Output | UpdatedBuffer)]
    nodes = extracted.module.graph
    nodes.output_node().args = (tuple(node for _, node in results),)
    for node in reversed(list(nodes.nodes)):
        is_kept = node.op in ("output", "placeholder") and not isinstance(node.meta.get("role"), LossGradient)
        if not (is_kept or node.users or is_check(node)):
            nodes.erase_node(node)
    return replace(extracted, mode=Mode.LOSS, results=tuple(role for role, _ in results))
