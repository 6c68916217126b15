"""Let products that are gradients of weights be added to the sum of gradients as they are made.

::

    dw = mm(dy.t(), x)            ->     sums[3].addmm_(dy.t(), x)
    return ..., (..., dw, ...)           return ..., (..., None, ...)

Nobody then writes the gradient of one microbatch, and reads it again to add it. The last bits of the sum
differ from those of the product that is rounded first.
"""

from dataclasses import dataclass

from pipec.graph import ACCUMULATING_METHODS, TrainingGraph
from pipec.passes.exclusive_gradients import exclusive_gradients


@dataclass(frozen=True)
class FuseGradientAccumulation:
    """Mark the gradients that are a matrix product of the parameter's own type. Others stay as they are."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for node in exclusive_gradients(graph):
            if node.target in ACCUMULATING_METHODS:
                node.meta["accumulated_in_place"] = True
        return graph
