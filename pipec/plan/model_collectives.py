"""The model collectives within the phases of a stage, and how long they take."""

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from pipec import ops
from pipec.cost.formulas import node_bytes
from pipec.graph import TrainingGraph
from pipec.graph.phase_functions import StageFunctions
from pipec.hardware.collective_costs import all_reduce_seconds, unshard_seconds
from pipec.hardware.topology import Topology
from pipec.ir import ModelCollective, Op
from pipec.plan.node_values import plan_value

_OPS = {
    ops.ALL_REDUCE: Op.ALL_REDUCE,
    ops.ALL_GATHER: Op.ALL_GATHER,
    ops.REDUCE_SCATTER: Op.REDUCE_SCATTER,
}


def model_collectives_of(
    graph: TrainingGraph,
    stage: StageFunctions,
    names: Mapping[fx.Node, str],
    ranks: Sequence[int],
    topology: Topology,
    size: int,
) -> Iterator[ModelCollective]:
    """The model collectives of a stage on ``ranks``, in the order in which a microbatch reaches them."""
    for function in stage.functions:
        for node in function.collectives:
            op = _OPS[node.target]  # type: ignore[index]
            num_bytes = node_bytes(node, size) * (len(ranks) if op is Op.REDUCE_SCATTER else 1)
            seconds_of = all_reduce_seconds if op is Op.ALL_REDUCE else unshard_seconds
            seconds = seconds_of(topology, ranks, num_bytes)
            value = plan_value(graph, node, names[node])
            yield ModelCollective(op, function.phase, function.segment + 1, value, seconds)
