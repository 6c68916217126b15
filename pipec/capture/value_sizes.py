"""Sizes that values alone tell, as how many rows a mask selects: they become nodes of the graph.

::

    selected = x[mask]             u0 rows         selected = x[mask]
    y = zeros([2 * u0])                     ->     size = sym_size(selected, 0)
                                                   twice = formula(2 * u0, size)
                                                   y = zeros([twice])

Whatever was asserted of them is required of every microbatch: tracing took it for granted.
"""

import operator
from collections.abc import Collection, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from pipec.capture.diagnosis import lines_in, model_line
from pipec.capture.rewriting import KEPT
from pipec.graph import formula
from pipec.kernels import require
from pipec.torch_compat import (
    JointGraph,
    ValueSize,
    depends_on_values,
    python_expression,
    value_symbols,
)

Sizes = Mapping[sympy.Symbol, fx.Node]
"""The node of each size."""


class ValueDependentError(Exception):
    """A size in the graph depends on the values of a tensor. The message ends with a printed traceback."""


def keep_value_sizes(joint: JointGraph, numbers: Collection[sympy.Symbol]) -> dict[sympy.Symbol, sympy.Expr]:
    """Put nodes in place of sizes that values tell, and mark what depends on them with ``varies``.

    ``numbers`` are the symbols of numbers in the arguments, which are no such sizes. Returns what to predict
    for each size: how many elements the tensor has that tells it.

    Raises:
        ValueDependentError: something depends on values in another way, as the result of ``.item()`` does.
    """
    nodes: dict[sympy.Symbol, fx.Node] = {}
    predicted: dict[sympy.Symbol, sympy.Expr] = {}
    required = [_resolved(condition, joint) for condition in joint.asserted]
    for found in joint.value_sizes:
        symbol, size = _resolved(found.symbol, joint), _size_node(found)
        if symbol in nodes or not isinstance(symbol, sympy.Symbol):
            required.append(sympy.Eq(found.symbol, symbol))
            symbol = found.symbol
        nodes[symbol] = size
        predicted[symbol] = _number_of_elements(found.node).xreplace(predicted)
    for condition in dict.fromkeys(required):
        if condition.free_symbols & nodes.keys() and not _always_holds(condition, predicted):
            _require(condition, nodes)
    for node in joint.module.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and "varies" not in node.meta and depends_on_values(value, numbers):
            _check_known(node, nodes)
            node.meta["varies"] = True
            if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
                node.replace_all_uses_with(_formula(value.node.expr, nodes, node))
    return predicted


def _resolved(expression: Any, joint: JointGraph) -> Any:
    """The expression without symbols that were replaced while tracing."""
    while (replaced := expression.xreplace(joint.replacements)) != expression:
        expression = replaced
    return expression


def _size_node(found: ValueSize) -> fx.Node:
    graph, tensor = found.node.graph, found.node
    if found.item is not None:
        items = {user.args[1]: user for user in tensor.users if user.target is operator.getitem}
        tensor = items[found.item]
    size = tensor.meta["val"].shape[found.dim]
    with graph.inserting_after(tensor):
        return _made(graph.call_function(torch.ops.aten.sym_size.int, (tensor, found.dim)), tensor, size)


def _formula(expression: Any, nodes: Sizes, reader: fx.Node) -> fx.Node:
    """A node that computes ``expression``, before ``reader``."""
    if expression in nodes:
        return nodes[expression]
    symbols = sorted((symbol for symbol in expression.free_symbols if symbol in nodes), key=str)
    with reader.graph.inserting_before(reader):
        made = reader.graph.call_function(formula, (expression, *(nodes[symbol] for symbol in symbols)))
    return _made(made, reader, reader.meta["val"])


def _require(condition: sympy.Basic, nodes: Sizes) -> None:
    """Let the stage that knows the last of the sizes in ``condition`` look whether it holds."""
    graph = next(iter(nodes.values())).graph
    read = {nodes[symbol] for symbol in condition.free_symbols & nodes.keys()}
    last = [node for node in graph.nodes if node in read][-1]
    line = model_line(lines_in(last.meta.get("stack_trace") or ""))
    with graph.inserting_after(last):
        checked = _made(graph.call_function(require, (None, "")), last, None)
    holds = _formula(condition, nodes, checked)
    checked.args = (holds, f"expected {python_expression(condition)} of the sizes that values tell at {line}")


def _made(node: fx.Node, source: fx.Node, value: Any) -> fx.Node:
    node.meta = {key: source.meta[key] for key in KEPT if key in source.meta}
    node.meta.update(val=value, varies=True)
    return node


def _check_known(node: fx.Node, nodes: Sizes) -> None:
    if not value_symbols(node.meta["val"]) <= nodes.keys():
        where = node.meta.get("stack_trace")
        raise ValueDependentError(f"data-dependent result of {node.target}\n{where}")


def _always_holds(condition: sympy.Basic, predicted: Mapping[sympy.Symbol, sympy.Expr]) -> bool:
    """Whether a condition holds of all sizes that are not negative, and not more than what is predicted."""
    counts = {symbol: sympy.Symbol(str(symbol), integer=True, nonnegative=True) for symbol in predicted}
    at_most = [sympy.Le(symbol, most) for symbol, most in predicted.items()]
    return condition in at_most or condition.xreplace(counts) == sympy.true


def _number_of_elements(node: fx.Node) -> sympy.Expr:
    """Of the mask among the inputs of the node, or else of the first of them."""
    values = [source.meta["val"] for source in node.all_input_nodes]
    tensors = [value for value in values if isinstance(value, Tensor)]
    told_by = next((tensor for tensor in tensors if tensor.dtype is torch.bool), tensors[0])
    return sympy.Mul(*(sympy.sympify(size) for size in told_by.shape))
