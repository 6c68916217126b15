"""Which values a parameter's sum of gradients may take in another form than that of the parameter."""

from collections import Counter
from collections.abc import Iterator

from torch import fx

from pipec.graph import Gradient, Parameter, TrainingGraph


def exclusive_gradients(graph: TrainingGraph) -> Iterator[fx.Node]:
    """Values that are the whole gradient of one parameter and of its type, and that nothing else reads."""
    results = Counter(node for _, node in graph.outputs)
    arguments = {node.meta["role"]: node for node in graph.arguments}
    for role, node in graph.outputs:
        if (
            isinstance(role, Gradient)
            and results[node] == len(node.users) == 1
            and node.meta["val"].dtype == arguments[Parameter(role.fqn)].meta["val"].dtype
        ):
            yield node
