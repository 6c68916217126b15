"""Numbers operators of a captured graph, and gives nodes of its joint graph their operator and phase."""

import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from pipec.capture.graph_calls import source_line
from pipec.graph import (
    LossGradient,
    Operator,
    OutputGradient,
    depends_on_strides,
    is_check,
    is_collective,
    is_constant,
    is_random,
    is_view,
)
from pipec.ir import Phase
from pipec.torch_compat.compared_values import fqn_of
from pipec.torch_compat.differentiation import ASSERTIONS
from pipec.torch_compat.make_fx_front_end import CAUSE

OPERATOR_ID = "pipec_operator"
"""Key in ``node.meta["custom"]`` of the operator that caused a node. Differentiation copies what is there."""

BACKWARD = "pipec_backward"
"""Key in ``node.meta["custom"]`` of nodes of the backward, where the captured graph has some."""

INLINED = {torch.ops.higher_order.tag_activation_checkpoint}
"""Operators that call a graph and are taken apart: the nodes of that graph are operators of their own."""


def number_operators(captured: fx.GraphModule) -> tuple[Operator, ...]:
    """Give every torch-level call its number.

    A call of a graph, such as a custom autograd function, is one operator.
    """
    operators: list[Operator] = []
    _number(captured, operators, None, 0)
    return tuple(operators)


def _number(
    module: fx.GraphModule, operators: list[Operator], enclosing: int | None, checkpoint: int
) -> None:
    checkpoints = itertools.count(1)
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or _computes_sizes(node):
            continue
        if CAUSE in node.meta:
            cause = node.meta[CAUSE]
            known = cause.meta.get("custom", {}) if cause else {}
            node.meta["custom"] = {BACKWARD: True, **known}
            continue
        number = enclosing
        if enclosing is None and node.target not in INLINED:
            number = len(operators)
            operators.append(_operator(node, checkpoint))
        if number is not None:
            node.meta["custom"] = {OPERATOR_ID: number}
        within = checkpoint or (next(checkpoints) if node.target in INLINED else 0)
        for called in _called_graphs(module, node):
            _number(called, operators, number, within)


def _called_graphs(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.GraphModule]:
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            held = operator.attrgetter(str(argument.target))(module)
            if isinstance(held, fx.GraphModule):
                yield held


def _operator(node: fx.Node, checkpoint: int) -> Operator:
    module, module_type = module_of(node)
    line = source_line(node)
    paths = (path for path, _ in _module_calls(node) if path.startswith("model."))  # not those of the loss
    callers = tuple(dict.fromkeys(path.removeprefix("model.") for path in paths))
    return Operator(node.name, module, module_type, line.place if line else "", checkpoint, callers)


def _computes_sizes(node: fx.Node) -> bool:
    if node.target in ASSERTIONS:
        return True
    value = node.meta.get("example_value", node.meta.get("val"))
    return isinstance(value, torch.SymInt | torch.SymBool | int)


def module_of(node: fx.Node) -> tuple[str, str]:
    """FQN and class name of the innermost module of the model that a captured node belongs to."""
    calls = _module_calls(node)
    path, module_type = calls[-1] if calls else ("", "")
    return path.removeprefix("model").removeprefix("."), module_type


def _module_calls(node: fx.Node) -> list[tuple[str, str]]:
    """Path and class name of the modules whose calls a captured node belongs to, the outermost first.

    The model's own are below ``model``.
    """
    stack = (node.meta.get("nn_module_stack") or {}).values()
    names = ((path, kind if isinstance(kind, str) else kind.__name__) for path, kind in stack)
    return [(fqn_of(path), name.rsplit(".", 1)[-1]) for path, name in names]


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
