"""Mark the forward values that a stage computes again for its backward, instead of saving them.

::

    h = relu(x)            stage 1 FORWARD            h = relu(x)            stage 1 FORWARD, recomputed
    g = gelu(h)            stage 1 FORWARD     ->     g = gelu(h)            stage 1 FORWARD, recomputed
    dg = gelu_back(d, h)   stage 1 BACKWARD           dg = gelu_back(d, h)   stage 1 BACKWARD
"""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from torch import fx

from pipec.cost.formulas import node_bytes
from pipec.graph import (
    Buffer,
    TrainingGraph,
    is_collective,
    is_constant,
    is_data_dependent_number,
    is_forward,
    is_tensor,
    is_view,
    recv,
    send,
    stage_of,
)
from pipec.graph.in_place import owns_new_storage
from pipec.ir import Phase
from pipec.passes.mark_offload import LEAST_OFFLOADED_BYTES, may_offload
from pipec.planner.recompute_solver import ForwardValue


@dataclass(frozen=True)
class MarkRecompute:
    """Values named in ``recomputed`` are computed again; with None, all that can be.

    With None, stages save only received values, as in GPipe (Huang et al. 2019, section 2.3), and results of
    model collectives. Random operators draw the same numbers again, because each has a seed of its own.

    A stage recomputes in a phase before its backward, which can run while the stage waits for gradients. The
    backward of a stage in ``in_backward`` instead computes each value where it is first read, so that the
    stage does not hold all of them at once.
    """

    recomputed: frozenset[str] | None = field(default=frozenset(), repr=False)
    in_backward: frozenset[int] = frozenset()

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        for node in filter(is_forward, graph.nodes):
            if not is_constant(node):
                chosen = self.recomputed is None or node.name in self.recomputed
                phase = Phase.BACKWARD if stage_of(node) in self.in_backward else Phase.RECOMPUTE
                node.meta["recompute"] = phase if chosen and is_recomputable(node) else None
        return graph


def is_recomputable(node: fx.Node) -> bool:
    """Whether the stage can compute the forward value again by itself."""
    return node.op == "call_function" and node.target not in (send, recv) and not is_collective(node)


def checkpointed_values(graph: TrainingGraph) -> frozenset[str]:
    """The values that ``torch.utils.checkpoint`` in the model computes again.

    A region keeps what it is given and what others read of it; its other values are of it alone.
    """

    def region(node: fx.Node) -> int:
        return graph.operators[node.meta["operator"]].checkpoint if "operator" in node.meta else 0

    def leaves(node: fx.Node, inside: int) -> bool:
        readers = [user for user in node.users if user.op == "output" or is_forward(user)]
        return any(region(each) != inside or (_passes_on(each) and leaves(each, inside)) for each in readers)

    def is_saved(node: fx.Node, inside: int) -> bool:
        if is_tensor(node):
            return leaves(node, inside)
        return all(leaves(item, inside) for item in node.users)  # a tuple itself cannot be saved

    values = (node for node in graph.module.graph.nodes if _owns_memory(node) and node.op == "call_function")
    return frozenset(
        node.name
        for node in values
        if is_recomputable(node) and (inside := region(node)) and not is_saved(node, inside)
    )


def _passes_on(node: fx.Node) -> bool:
    """Whether a node hands on the memory of its input."""
    return node.target is operator.getitem or is_view(node)


def forward_values(graph: TrainingGraph, size: int) -> dict[fx.Node, ForwardValue]:
    """The forward values that own memory, in order, for microbatches of ``size`` rows.

    Buffers that the forward changes are included, because the backward cannot read their former values. Views
    are not, because they are made again wherever they are read. Such buffers, and received values, are in
    memory in any case and count no bytes.
    """
    nodes = list(filter(_owns_memory, graph.module.graph.nodes))
    position = {node: k for k, node in enumerate(nodes)}
    backward = (node for node in graph.nodes if not is_forward(node))
    needed = {source for node in backward for source in _owners(node.all_input_nodes)}

    def inputs(node: fx.Node) -> tuple[int, ...]:
        sources = dict.fromkeys(_owners(node.all_input_nodes)) if is_recomputable(node) else ()
        return tuple(position[source] for source in sources if source in position)

    return {
        node: ForwardValue(
            num_bytes=node_bytes(node, size) if owns_new_storage(node) else 0,
            seconds=node.meta["cost"].seconds(size),
            inputs=inputs(node),
            is_needed=node in needed,
            may_save=is_tensor(node) or is_data_dependent_number(node),
            is_recomputable=is_recomputable(node),
            may_offload=may_offload(node) and node_bytes(node, size) >= LEAST_OFFLOADED_BYTES,
        )
        for node in nodes
    }


def stage_values(graph: TrainingGraph, size: int) -> list[dict[str, ForwardValue]]:
    """The ``forward_values`` of each stage by name, once stages communicate.

    Inputs of a value are positions in its stage.
    """
    stages: list[dict[str, ForwardValue]] = [{} for _ in range(graph.num_stages)]
    position = []
    for node, value in forward_values(graph, size).items():
        values = stages[_stage(node)]
        position.append(len(values))
        values[node.name] = replace(value, inputs=tuple(position[source] for source in value.inputs))
    return stages


def _owns_memory(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return (
            isinstance(node.meta["role"], Buffer)
            and bool(node.meta["updated"])
            and any(user.op == "call_function" for user in node.users)
        )
    forward = node.op == "call_function" and is_forward(node) and not is_constant(node)
    return forward and node.target is not send and not is_view(node)


def _owners(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The nodes that own the memory of ``nodes``, and the other inputs of those that are views."""
    for node in nodes:
        if node.op == "call_function" and is_view(node) and not is_constant(node):
            yield from _owners(node.all_input_nodes)
        else:
            yield node


def _stage(node: fx.Node) -> int:
    """The stage of a value; for a buffer the stage of its readers, which are all on one."""
    staged = node if node.op == "call_function" else next(user for user in node.users if "stage" in user.meta)
    return stage_of(staged)
