"""Numbers the operators of a captured forward graph. Its joint graph inherits the numbers."""

import itertools
import operator
from collections.abc import Iterator

import torch
from torch import fx

from pipec.capture.diagnosis import innermost_model_line, traceback_lines
from pipec.graph import Operator
from pipec.torch_compat.differentiation import ASSERTIONS
from pipec.torch_compat.make_fx_front_end import CAUSE
from pipec.torch_compat.values import fqn_of

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
    line = innermost_model_line(traceback_lines(node.meta.get("stack_trace") or ""))
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
