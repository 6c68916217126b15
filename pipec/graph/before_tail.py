"""The forward nodes that the tail needs, and whether forwards can run a second time after it."""

import operator
from collections.abc import Sequence

import torch
from torch import fx

from pipec.graph.branch_checks import is_check
from pipec.graph.nodes import TailInput, UpdatedBuffer, is_collective, is_forward
from pipec.graph.training_graph import TrainingGraph

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_RUNNING_STATISTICS, _IS_TRAINING = (3, 4), 5
"""Positions among the arguments of ``_BATCH_NORM``, and of the new statistics among its results. In training
nothing but these results depends on the statistics."""


def needed_by_tail(graph: TrainingGraph) -> set[fx.Node]:
    """The forward nodes that lead to the inputs of the tail, and the checks of their values."""
    needed = set[fx.Node]()
    pending = [node for role, node in graph.outputs if isinstance(role, TailInput)]
    while pending:
        node = pending.pop()
        if node not in needed and node.op == "call_function":
            needed.add(node)
            pending += node.all_input_nodes
    checks = (node for node in graph.nodes if is_check(node) and is_forward(node))
    return needed | {
        each for each in checks if all(x in needed or x.op == "placeholder" for x in each.all_input_nodes)
    }


def needed_by_tail_alone(graph: TrainingGraph) -> set[fx.Node]:
    """The forward nodes that nothing but the tail reads. A second forward leaves them out."""
    inputs = {node for role, node in graph.outputs if isinstance(role, TailInput)}
    results = {node for role, node in graph.outputs if not isinstance(role, TailInput)}
    found = set[fx.Node]()
    for node in reversed([*graph.nodes]):
        readers = {user for user in node.users if user.op == "call_function"}
        if (node in inputs or readers) and readers <= found and node not in results:
            found.add(node)
    return found


def not_repeatable(graph: TrainingGraph) -> str:
    """Why forwards cannot run twice, once before the tail and once after it; empty if they can.

    What the tail reads must be the same both times. So it may not depend on a buffer that forwards change,
    and no forward may read a buffer that the tail changes. Statistics of a batch norm in training are
    written, not read. The first forwards write no buffer.
    """
    needed = needed_by_tail(graph)
    by_tail = {role.fqn for role, _ in graph.tail_outputs if isinstance(role, UpdatedBuffer)}
    for node in filter(is_forward, graph.nodes):
        if is_collective(node):
            return "the model has collectives of replicas"
        for fqn in _buffers_read(node, needed):
            if fqn in by_tail:
                return f"they read the buffer {fqn}, which the tail changes"
            if node in needed:
                return f"they read the buffer {fqn}, which they change"
    return ""


def _buffers_read(node: fx.Node, needed: set[fx.Node]) -> Sequence[str]:
    """The changing buffers that influence a node; statistics do if something ``needed`` reads new ones."""
    unread = list[object]()
    if node.target is _BATCH_NORM and node.args[_IS_TRAINING]:
        items = {user.args[1] for user in node.users if user in needed and user.target is operator.getitem}
        unread = [node.args[k] for k in _RUNNING_STATISTICS if not items.intersection(_RUNNING_STATISTICS)]
    arguments = [source for source in node.all_input_nodes if source.op == "placeholder"]
    return [each.meta["role"].fqn for each in arguments if each.meta.get("updated") and each not in unread]
