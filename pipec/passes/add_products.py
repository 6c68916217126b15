"""Let products that are gradients of weights be added to the sum of gradients as they are made.

::

    dw = mm(dy.t(), x)            ->     sums[3].addmm_(dy.t(), x)
    return ..., (..., dw, ...)           return ..., (..., None, ...)

Nobody then writes the gradient of one microbatch, and reads it again to add it. The last bits of the sum
differ from those of the product that is rounded first.
"""

from collections import Counter
from dataclasses import dataclass

from pipec.graph import IN_SUMS, Gradient, Parameter, TrainingGraph


@dataclass(frozen=True)
class AddProducts:
    """Mark the gradients that are a matrix product of the parameter's own type. Others stay as they are."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        results = Counter(node for _, node in graph.outputs)
        weights = {node.meta["role"]: node for node in graph.arguments}
        for role, node in graph.outputs:
            if (
                isinstance(role, Gradient)
                and node.target in IN_SUMS
                and results[node] == len(node.users) == 1
            ):
                node.meta["in_sum"] = node.meta["val"].dtype == weights[Parameter(role.fqn)].meta["val"].dtype
        return graph
