"""Add matrix products that are weight gradients to the sum of gradients within the product itself.

::

    dw = mm(dy.t(), x)            ->     sums[3].addmm_(dy.t(), x)
    return ..., (..., dw, ...)           return ..., (..., None, ...)

This saves writing the gradient of one microbatch and reading it again to add it. The last bits of the sum
change, because the product is no longer rounded before it is added.
"""

from dataclasses import dataclass

from pipec.graph import ACCUMULATING_METHODS, TrainingGraph
from pipec.passes.exclusive_gradients import exclusive_gradients


@dataclass(frozen=True)
class FuseGradientAccumulation:
    """Mark the gradients that are matrix products and have the parameter's dtype."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for node in exclusive_gradients(graph):
            if node.target in ACCUMULATING_METHODS:
                node.meta["accumulated_in_place"] = True
        return graph
