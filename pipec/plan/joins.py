"""What the replicas of a stage join within its phases, and how long that takes."""

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from pipec import ops
from pipec.cost.formulas import node_bytes
from pipec.graph import TrainingGraph
from pipec.graph.functions import StageFunctions
from pipec.hardware.collectives import all_reduce_seconds, fastest_num_hosts, gather_seconds
from pipec.hardware.topology import Topology
from pipec.ir import Join, Op
from pipec.plan.values import value_of

_OPS = {
    ops.ALL_REDUCE: Op.ALL_REDUCE,
    ops.ALL_GATHER: Op.ALL_GATHER,
    ops.REDUCE_SCATTER: Op.REDUCE_SCATTER,
}


def joins_of(
    graph: TrainingGraph,
    stage: StageFunctions,
    names: Mapping[fx.Node, str],
    ranks: Sequence[int],
    topology: Topology,
    size: int,
) -> Iterator[Join]:
    """What the ``ranks`` of a stage join, in the order in which a microbatch comes to it."""
    for function in stage.functions:
        for node in function.joined:
            op = _OPS[node.target]  # type: ignore[index]
            num_bytes = node_bytes(node, size) * (len(ranks) if op is Op.REDUCE_SCATTER else 1)
            num_hosts = fastest_num_hosts(topology, ranks, num_bytes)
            seconds_of = all_reduce_seconds if op is Op.ALL_REDUCE else gather_seconds
            seconds = seconds_of(topology, ranks, num_bytes, num_hosts)
            value = value_of(graph, node, names[node])
            yield Join(op, function.phase, function.part + 1, value, num_hosts, seconds)
