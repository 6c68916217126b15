"""Let large matrix products reuse the memory of earlier ones.

::

    y = mm(a, b)     ->     y = mm(a, b, out=empty_cached([256*b, 32768], torch.float32, device))

No bits change. Only products are marked: most other large values are computed in the memory of an operand.
"""

from dataclasses import dataclass

import torch
from torch import fx

from pipec.cost.formulas import node_bytes
from pipec.graph import TrainingGraph
from pipec.ir import MMAP_THRESHOLD_BYTES

aten = torch.ops.aten

PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


@dataclass(frozen=True)
class ReuseMemory:
    """Mark the products of at least ``MMAP_THRESHOLD_BYTES`` at the planned microbatch size."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for node in graph.nodes:
            if _is_product(node) and node_bytes(node, graph.batch_size) >= MMAP_THRESHOLD_BYTES:
                node.meta["reuses_memory"] = True
        return graph


def _is_product(node: fx.Node) -> bool:
    return node.target in PRODUCTS and not node.kwargs
