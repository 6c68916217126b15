"""Give every node its cost: FLOPs, bytes and seconds in the microbatch size.

::

    h = addmm(bias, x, w)     ->     h = addmm(bias, x, w)      cost: 2*b*128*768*768 FLOPs, ...
    v = view(h, ...)                 v = view(h, ...)           cost: nothing, 393216*b bytes of output
"""

from dataclasses import dataclass, field, replace

from pipec.cost.formulas import MeasuredTime, OperatorCost, operator_cost
from pipec.cost.graph_fingerprint import check_profile
from pipec.cost.profile import Profile
from pipec.cost.symbolic_sizes import symbol_substitutions, tensor_sizes
from pipec.errors import InputError
from pipec.graph import Gradient, TrainingGraph, is_collective
from pipec.hardware.devices import DeviceModel


@dataclass(frozen=True)
class AnnotateCost:
    """``device`` describes what the nodes will run on: it turns FLOPs and bytes into seconds.

    Adding up gradients counts as part of making them. If there is a ``profile``, its seconds replace those of
    the model; they include the adding up as well.

    Raises:
        InputError: the profile is of another graph, or the graph is of several replicas.
    """

    device: DeviceModel
    profile: Profile | None = field(default=None, repr=False)

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        nodes = graph.module.graph.nodes
        sizes = {node: tensor_sizes(node.meta.get("val")) for node in nodes}
        planned = symbol_substitutions(graph)
        for node in nodes:
            node.meta["cost"] = operator_cost(node, sizes, planned, self.device)
        for result, node in graph.outputs:
            if isinstance(result, Gradient):
                node.meta["cost"] = _accumulated(node.meta["cost"])
        if self.profile is not None:
            _measure(graph, self.profile)
        return graph


def _accumulated(cost: OperatorCost) -> OperatorCost:
    """The cost with the addition to the gradients so far, which reads two tensors and writes one."""
    return replace(cost, bytes_moved=cost.bytes_moved + 3 * cost.output_bytes, launches=1)


def _measure(graph: TrainingGraph, profile: Profile) -> None:
    if any(map(is_collective, graph.nodes)):
        raise InputError(
            "a profile is of one replica alone, but the model joins what several have, by pipec.ops or "
            "nn.SyncBatchNorm; leave out profile=..."
        )
    check_profile(profile, graph)
    seconds = profile.seconds()
    for node in graph.nodes:
        if node.name in seconds:
            measured = MeasuredTime(seconds[node.name], profile.microbatch_size)
            node.meta["cost"] = replace(node.meta["cost"], measured=measured)
