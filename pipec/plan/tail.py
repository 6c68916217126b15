"""The tail of a plan: what a stage computes once a step, of all rows, and what that costs."""

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from pipec.cost.formulas import node_bytes
from pipec.cost.symbolic_sizes import evaluate_cost
from pipec.graph import TailGradient, TailInput, TrainingGraph, source_parameters
from pipec.graph.lifetimes import storage_owners
from pipec.graph.phase_functions import StageFunctions
from pipec.hardware.collective_costs import unshard_seconds
from pipec.hardware.topology import Topology
from pipec.ir import Phase, Tail
from pipec.plan.node_values import plan_value


def build_tail(
    graph: TrainingGraph,
    stage: StageFunctions,
    names: Mapping[fx.Node, str],
    microbatch_size: int,
    num_microbatches: int,
    ranks: Sequence[int],
    topology: Topology,
) -> Tail | None:
    """The tail of a stage, which computes with the rows of all microbatches; None if it has none."""
    tail, num_rows = stage.tail, microbatch_size * num_microbatches
    if tail is None:
        return None

    def bytes_of(node: fx.Node) -> int:
        return node_bytes(node, num_rows)

    inputs = [node for node in tail.inputs if isinstance(node.meta["role"], TailInput)]
    gradients = [node for node in graph.arguments if isinstance(node.meta["role"], TailGradient)]
    read = {fqn for node in tail.read_nodes for fqn in source_parameters(node)}
    rows = [node for function in stage.functions for _, node in function.tail_values]
    speed = min(topology.devices[rank].speed for rank in ranks)
    return Tail(
        inputs=tuple(plan_value(graph, node, names[node]) for node in inputs),
        gradients=tuple(plan_value(graph, node, names[node]) for node in gradients),
        results=tuple(names[node] for node in tail.outputs),
        parameters=tuple(fqn for node in stage.parameters if (fqn := node.meta["role"].fqn) in read),
        updated_buffers=tuple(fqn for fqn, _ in tail.buffer_updates),
        location=graph.findings.tail,
        flops=sum(evaluate_cost(node.meta["cost"].flops, num_rows) for node in tail.body),
        seconds=sum(node.meta["cost"].seconds(num_rows) for node in tail.body) / speed,
        gather_seconds=unshard_seconds(topology, ranks, sum(map(bytes_of, inputs))),
        transient_bytes=tail.lifetimes.memory(bytes_of).peak,
        unsaved_bytes=sum(node_bytes(node, microbatch_size) for node in _kept(stage, rows)),
    )


def _kept(stage: StageFunctions, rows: Sequence[fx.Node]) -> Collection[fx.Node]:
    """The values that each forward keeps for the tail alone."""
    return storage_owners(rows) - storage_owners(stage.phase_functions(Phase.FORWARD)[-1].saved_out)
