"""Give every node its cost: FLOPs, bytes and seconds as formulas in the microbatch size.

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
    """``device`` converts FLOPs and bytes into seconds.

    The cost of a gradient includes adding it to the sum so far. The seconds of a ``profile``, if there is
    one, replace the estimates; they include that addition too.

    Raises:
        InputError: the profile is of another graph, or the graph has model collectives.
    """

    device: DeviceModel
    profile: Profile | None = field(default=None, repr=False)

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        nodes = graph.module.graph.nodes
        sizes = {node: tensor_sizes(node.meta.get("val")) for node in nodes}
        substitutions = symbol_substitutions(graph)
        for node in nodes:
            node.meta["cost"] = operator_cost(node, sizes, substitutions, self.device)
        for result, node in graph.outputs:
            if isinstance(result, Gradient):
                node.meta["cost"] = _with_accumulation(node.meta["cost"])
        if self.profile is not None:
            _apply_profile(graph, self.profile)
        return graph


def _with_accumulation(cost: OperatorCost) -> OperatorCost:
    """The cost plus the addition to the sum of gradients, which reads two tensors and writes one."""
    return replace(cost, bytes_moved=cost.bytes_moved + 3 * cost.output_bytes, launches=1)


def _apply_profile(graph: TrainingGraph, profile: Profile) -> None:
    if any(map(is_collective, graph.nodes)):
        raise InputError(
            "a profile is measured on one replica, but the model has collectives between replicas, by "
            "pipec.ops or nn.SyncBatchNorm; leave out costs=..."
        )
    check_profile(profile, graph)
    seconds = profile.seconds()
    for node in graph.nodes:
        if node.name in seconds:
            measured = MeasuredTime(seconds[node.name], profile.microbatch_size)
            node.meta["cost"] = replace(node.meta["cost"], measured=measured)
