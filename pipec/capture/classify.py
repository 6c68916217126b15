"""Gives every node of a joint graph the phase it runs in and the forward operator that caused it."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from pipec.capture.number_operators import BACKWARD, OPERATOR_ID
from pipec.graph import (
    LossGradient,
    OutputGradient,
    depends_on_strides,
    is_check,
    is_collective,
    is_constant,
    is_random,
    is_view,
)
from pipec.ir import Phase


def classify(graph: fx.Graph) -> None:
    """Set ``phase``, ``operator``, ``random_seed`` and ``constant``, which ``pipec.graph.nodes`` explains.

    Differentiation annotates most nodes with their operator. The others are placed by what they read, and
    those that read nothing by what reads them.
    """
    draws = itertools.count()
    for node in graph.nodes:
        if node.op != "output":
            node.meta["phase"] = Phase.BACKWARD if _is_backward(node) else Phase.FORWARD
        if node.op in ("call_function", "get_attr"):
            operator = _operator_of(node)
            if operator is not None:
                node.meta["operator"] = operator
        if node.op == "call_function":
            if is_check(node):
                node.meta["val"] = None
            if is_random(node):
                node.meta["random_seed"] = next(draws)
            done_here = is_random(node) or is_collective(node) or is_check(node)
            free = node.meta["phase"] is Phase.FORWARD and not done_here
            node.meta["constant"] = free and all(map(is_constant, node.all_input_nodes))
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and "operator" not in node.meta:
            node.meta["operator"] = _operator_of_readers(node)
    for node in list(graph.nodes):
        if depends_on_strides(node) and node.meta["phase"] is Phase.FORWARD:
            _keep_with_memory(node)


def _keep_with_memory(reader: fx.Node) -> None:
    """Place a node that reads raw memory, such as ``as_strided``, on the stage that filled that memory.

    A stage sends values, and no gaps, order or neighbours that they have in memory. Of a model's input, whose
    memory has the rows of other microbatches too, the reader gets a copy.
    """
    views, source = [reader], reader.all_input_nodes[0]
    while is_view(source) and source.op == "call_function":
        views.append(source)
        source = source.all_input_nodes[0]
    if source.op == "placeholder":
        with reader.graph.inserting_before(views[-1]):
            copied = reader.graph.call_function(torch.ops.aten.clone.default, (source,))
        copied.meta = {**reader.meta, "val": source.meta["val"], "constant": False}
        views[-1].replace_input_with(source, copied)
    for view in views if source.op == "call_function" else ():
        view.meta["operator"] = source.meta["operator"]


def _is_backward(node: fx.Node) -> bool:
    if node.op == "placeholder":
        return isinstance(node.meta["role"], LossGradient | OutputGradient)
    if _noted(node).get(BACKWARD) or node.meta.get("partitioner_tag") in (
        "is_backward",
        "must_be_in_backward",
    ):
        return True
    return any(source.meta["phase"] is Phase.BACKWARD for source in node.all_input_nodes)


def _noted(node: fx.Node) -> Mapping[str, Any]:
    return node.meta.get("custom") or {}


def _operator_of(node: fx.Node) -> int | None:
    """The operator in the node's own annotation, unless the node reads what comes after it in its phase.

    A view that torch makes again, behind a change of what it shows, is annotated as the first one. Such a
    node, and one without an annotation, joins an operator among its inputs: the latest if it is a forward
    node, the earliest if it is a backward node. No edge to the node then runs against the order of the
    stages. Nothing is known of a node without an annotation and such inputs.
    """
    own, phase = _noted(node).get(OPERATOR_ID), node.meta["phase"]
    inputs = [source for source in node.all_input_nodes if "operator" in source.meta]
    same = [source for source in inputs if source.meta["phase"] is phase]
    ids: list[int] = [source.meta["operator"] for source in same or inputs]
    if own is not None:
        ids = [int(own), *(source.meta["operator"] for source in same)]
    choose = max if phase is Phase.FORWARD else min
    return choose(ids, default=None)


def _operator_of_readers(node: fx.Node) -> int:
    """The operator whose stage reads the node first, so that no edge from it runs against their order."""
    ids: list[int] = [user.meta["operator"] for user in node.users if user.op != "output"]
    choose = min if node.meta["phase"] is Phase.FORWARD else max
    return choose(ids, default=0)
