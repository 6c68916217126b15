"""Give every node its cost: FLOPs, bytes and seconds in the microbatch size.

::

    h = addmm(bias, x, w)     ->     h = addmm(bias, x, w)      cost: 2*b*128*768*768 FLOPs, ...
    v = view(h, ...)                 v = view(h, ...)           cost: nothing, 393216*b bytes of output
"""

from dataclasses import dataclass

from pipec.cost.devices import DeviceModel
from pipec.cost.formulas import OperatorCost, operator_cost, operator_name
from pipec.cost.symbols import tensor_sizes
from pipec.graph import TrainingGraph


@dataclass(frozen=True)
class AnnotateCost:
    """``device`` is what the nodes will run on; its model turns FLOPs and bytes into seconds."""

    device: DeviceModel

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        nodes = graph.module.graph.nodes
        sizes = {node: tensor_sizes(node.meta.get("val")) for node in nodes}
        for node in nodes:
            node.meta["cost"] = operator_cost(node, sizes, graph.batch, self.device)
        return graph


def unknown_operators(graph: TrainingGraph) -> list[str]:
    """Names of the operators that no FLOP formula covers, whose cost is the bytes they move, sorted."""
    costs: list[tuple[str, OperatorCost]] = [(operator_name(node), node.meta["cost"]) for node in graph.nodes]
    return sorted({name for name, cost in costs if not cost.known})
