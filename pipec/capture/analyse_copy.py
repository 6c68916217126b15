"""Analyses a copy of the graph, where the graph itself must not be rewritten."""

import copy
from collections.abc import Collection
from dataclasses import replace

from torch import fx

from pipec.capture.batch import analyse_batch
from pipec.capture.graph_calls import describe_call
from pipec.capture.markers import BATCH_COUNT, BATCH_FRACTION, OUTPUT_MERGE
from pipec.graph import BatchFindings
from pipec.torch_compat import pytree
from pipec.torch_compat.differentiation import CapturedGraph
from pipec.torch_compat.make_fx_front_end import CAUSE


def analyse_differentiated(
    captured: CapturedGraph,
    batched: Collection[str],
    size: int,
    has_loss: bool,
    num_replicas: int = 1,
) -> BatchFindings:
    """Run ``analyse_batch`` on a copy of the forward of a graph that already has its backward.

    Where it would rewrite the loss, it is not known how losses add up. Results are marked as they are there.
    """
    assert captured.results is not None
    graph, num_results = captured.module.graph, captured.results.num_leaves
    results: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    forward = fx.GraphModule(captured.module, _forward(graph, num_results))
    found = analyse_batch(forward, batched, size, has_loss, num_replicas)
    output = forward.graph.output_node()
    for place, (result, marked) in enumerate(zip(results, output.args[0], strict=False)):  # type: ignore[arg-type]
        if isinstance(marked, fx.Node) and marked.target is OUTPUT_MERGE:
            with graph.inserting_before(graph.output_node()):
                results[place] = graph.call_function(OUTPUT_MERGE, (result, *marked.args[1:]))
    graph.output_node().args = (results,)
    captured.module.recompile()
    found = replace(found, assumed=(*found.assumed, "the backward of the model's own adds up over rows"))
    rewritten = [node for node in _leading_to(output) if node.target in (BATCH_COUNT, BATCH_FRACTION)]
    if rewritten and not (found.mixed_rows or found.unproven):
        what = "needs a value of the whole batch, in a model that differentiates by itself"
        return replace(found, unproven=f"{describe_call(rewritten[0])} {what}")
    return found


def analyse_outputs(
    module: fx.GraphModule,
    batched: Collection[str],
    size: int,
    num_replicas: int,
) -> BatchFindings:
    """Run ``analyse_batch`` on a copy, for the outputs alone: the user says how losses add up.

    It is tried on a copy, whose marks the results get.
    """
    output = module.graph.output_node()
    results = [leaf for leaf in pytree.tree_leaves(output.args) if isinstance(leaf, fx.Node)]
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = fx.GraphModule(module, graph)
    found = analyse_batch(copied, batched, size, True, num_replicas)
    made = [x for x in pytree.tree_leaves(copied.graph.output_node().args) if isinstance(x, fx.Node)]
    marks: dict[fx.Node, fx.Node] = {}
    for result, marked in [*zip(results, made, strict=True)][1:]:
        rewritten = [node for node in _leading_to(marked) if node.target in (BATCH_COUNT, BATCH_FRACTION)]
        if marked.target is OUTPUT_MERGE or rewritten:
            why = f"{describe_call(rewritten[0])} needs a value of the whole batch" if rewritten else None
            rest = [why, []] if why else marked.args[1:]
            with module.graph.inserting_before(output):
                marks[result] = module.graph.call_function(OUTPUT_MERGE, (result, *rest))
    loss = results[0]
    output.args = fx.map_arg(output.args, lambda node: node if node is loss else marks.get(node, node))
    module.recompile()
    return replace(found, mixed_rows="", unproven="")


def _forward(graph: fx.Graph, num_results: int) -> fx.Graph:
    """A copy of the graph's forward."""
    forward = copy.deepcopy(graph)
    output = forward.output_node()
    output.args = (list(output.args[0])[:num_results],)  # type: ignore[arg-type]
    for copied, node in reversed([*zip(forward.nodes, graph.nodes, strict=True)]):
        if CAUSE in node.meta:
            forward.erase_node(copied)
    return forward


def _leading_to(output: fx.Node) -> list[fx.Node]:
    """The nodes that a result depends on, in reverse order."""
    needed = {output}
    for node in reversed(output.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in reversed(output.graph.nodes) if node in needed]
