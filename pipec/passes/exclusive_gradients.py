"""The terms of gradients, and those gradients that nothing else reads, so that their form may change."""

from collections import Counter
from collections.abc import Iterator

from torch import fx

from pipec.graph import Gradient, Parameter, TrainingGraph, is_gradient_sum


def exclusive_gradients(graph: TrainingGraph) -> Iterator[fx.Node]:
    """Yield the values that are one parameter's whole gradient, have its dtype, and have no other reader."""
    results = Counter(node for _, node in graph.outputs)
    arguments = {node.meta["role"]: node for node in graph.arguments}
    for role, node in graph.outputs:
        if (
            isinstance(role, Gradient)
            and results[node] == len(node.users) == 1
            and node.meta["val"].dtype == arguments[Parameter(role.fqn)].meta["val"].dtype
        ):
            yield node


def gradient_terms(gradient: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose sum is the gradient, in autograd's order."""
    if is_gradient_sum(gradient):
        for term in gradient.all_input_nodes:
            yield from gradient_terms(term)
    else:
        yield gradient
