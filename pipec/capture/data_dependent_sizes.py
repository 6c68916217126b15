"""Data-dependent sizes, such as how many rows a mask selects, become nodes of the graph.

::

    selected = x[mask]             u0 rows         selected = x[mask]
    y = zeros([2 * u0])                     ->     size = sym_size(selected, 0)
                                                   twice = size_expression(2 * u0, size)
                                                   y = zeros([twice])

Conditions that tracing assumed of them are checked for every microbatch.
"""

from collections.abc import Collection, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from pipec.capture.graph_calls import INHERITED_META, source_line
from pipec.capture.operators import OPERATOR_ID
from pipec.graph import size_expression
from pipec.primitives import require
from pipec.torch_compat.differentiation import (
    DataDependentSize,
    JointGraph,
    is_data_dependent,
    unbacked_symbols,
)
from pipec.torch_compat.symbolic_numbers import python_expression


class DataDependentError(Exception):
    """A size in the graph depends on the values of a tensor. The message ends with a printed traceback."""


def lift_data_dependent_sizes(
    joint: JointGraph, numbers: Collection[sympy.Symbol]
) -> dict[sympy.Symbol, sympy.Expr]:
    """Replace sizes that depend on values by nodes, and set ``has_data_dependent_size`` on what they reach.

    ``numbers`` are the symbols of numbers in the arguments, which are no such sizes. Returns what to predict
    for each size: how many elements the tensor has that tells it.

    Raises:
        DataDependentError: a number depends on values in another way, such as the result of ``.item()``.
    """
    sizes = _Sizes(joint.module.graph)
    predicted: dict[sympy.Symbol, sympy.Expr] = {}
    deciding_tensors: dict[sympy.Symbol, Any] = {}
    required = [_resolved(condition, joint) for condition in joint.asserted]
    for found in joint.data_dependent_sizes:
        symbol, deciding_tensor = _resolved(found.symbol, joint), _what_tells(found)
        if (
            not isinstance(symbol, sympy.Symbol)
            or deciding_tensors.setdefault(symbol, deciding_tensor) != deciding_tensor
        ):
            required.append(sympy.Eq(found.symbol, symbol))
            symbol = found.symbol
        sizes.add(symbol, _tensor_of(found), found.dim)
        predicted[symbol] = _number_of_elements(found.node).xreplace(predicted)
    for condition in dict.fromkeys(required):
        if sizes.symbols_in(condition) and not _always_holds(condition, predicted):
            _require(condition, sizes)
    calls = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    varying = [node for node in calls if is_data_dependent(node.meta.get("val"), numbers)]
    for node in varying:
        sizes.note(node)
        node.meta["has_data_dependent_size"] = True
    for node in varying:
        value = node.meta["val"]
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            for user in list(node.users):
                user.replace_input_with(node, sizes.formula(value.node.expr, user, value))
    return predicted


def _resolved(expression: Any, joint: JointGraph) -> Any:
    """The expression without symbols that were replaced while tracing."""
    while (replaced := expression.xreplace(joint.replacements)) != expression:
        expression = replaced
    return expression


def _tensor_of(found: DataDependentSize) -> fx.Node:
    if found.item is None:
        return found.node
    return next(user for user in found.node.users if user.args[1] == found.item)


def _what_tells(found: DataDependentSize) -> Any:
    """The dimension of a tensor, and the input that decides it: for ``x[mask]``, the mask alone."""
    node = found.node
    read = node.args[1] if node.target is torch.ops.aten.index.Tensor else node.args
    return found.item, found.dim, str(node.target), str(read)


class _Sizes:
    """The tensors that have each size, in order, and their dimension."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {node: number for number, node in enumerate(graph.nodes)}
        self._found: dict[sympy.Symbol, dict[fx.Node, int]] = {}
        self._nodes: dict[tuple[fx.Node, int], fx.Node] = {}

    def add(self, symbol: sympy.Symbol, tensor: fx.Node, dim: int) -> None:
        self._found.setdefault(symbol, {})[tensor] = dim

    def note(self, node: fx.Node) -> None:
        """Add the sizes of a node of the graph.

        Raises:
            DataDependentError: no tensor has one of the sizes that it depends on.
        """
        value = node.meta["val"]
        if not unbacked_symbols(value) <= self._found.keys():
            raise DataDependentError(
                f"data-dependent result of {node.target}\n{node.meta.get('stack_trace')}"
            )
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            symbol = sympy.sympify(size)
            if symbol in self._found:
                self._found[symbol].setdefault(node, dim)

    def symbols_in(self, expression: Any) -> list[sympy.Symbol]:
        return sorted(expression.free_symbols & self._found.keys(), key=str)

    def first(self, symbol: sympy.Symbol) -> fx.Node:
        """The first node that has the size."""
        return next(iter(self._found[symbol]))

    def formula(self, expression: Any, reader: fx.Node, value: Any) -> fx.Node:
        """A node that computes ``expression``, before ``reader``."""
        sizes = [self.node(symbol, reader) for symbol in self.symbols_in(expression)]
        if isinstance(expression, sympy.Symbol):
            return sizes[0]
        with reader.graph.inserting_before(reader):
            return _made(reader.graph.call_function(size_expression, (expression, *sizes)), reader, value)

    def node(self, symbol: sympy.Symbol, reader: fx.Node) -> fx.Node:
        """The size, read from the latest tensor that has it, up to the operator of ``reader``."""
        tensors, place = self._found[symbol], self._position.get(reader, 0)
        earlier = [tensor for tensor in tensors if self._position[tensor] < place]
        before = [tensor for tensor in earlier if _operator_of(tensor) <= _operator_of(reader)]
        tensor = max(before or [self.first(symbol)], key=_operator_of)
        dim = tensors[tensor]
        if (tensor, dim) not in self._nodes:
            with tensor.graph.inserting_after(tensor):
                made = tensor.graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))
            self._nodes[tensor, dim] = _made(made, tensor, tensor.meta["val"].shape[dim])
        return self._nodes[tensor, dim]


def _require(condition: sympy.Basic, sizes: _Sizes) -> None:
    """Check ``condition`` on the stage that makes the last of its sizes."""
    read = {sizes.node(symbol, sizes.first(symbol)) for symbol in sizes.symbols_in(condition)}
    last = [node for node in next(iter(read)).graph.nodes if node in read][-1]
    line = source_line(last)
    with last.graph.inserting_after(last):
        checked = _made(last.graph.call_function(require, (None, "")), last, None)
    holds = sizes.formula(condition, checked, True)
    checked.args = (holds, f"expected {python_expression(condition)} of the data-dependent sizes at {line}")


def _made(node: fx.Node, source: fx.Node, value: Any) -> fx.Node:
    node.meta = {key: source.meta[key] for key in INHERITED_META if key in source.meta}
    node.meta.update(val=value, has_data_dependent_size=True)
    return node


def _operator_of(node: fx.Node) -> int:
    return int((node.meta.get("custom") or {}).get(OPERATOR_ID, 0))


def _always_holds(condition: sympy.Basic, predicted: Mapping[sympy.Symbol, sympy.Expr]) -> bool:
    """Whether a condition holds for all sizes from zero to the predicted maximum."""
    counts = {symbol: sympy.Symbol(str(symbol), integer=True, nonnegative=True) for symbol in predicted}
    at_most = [sympy.Le(symbol, most) for symbol, most in predicted.items()]
    return condition in at_most or condition.xreplace(counts) == sympy.true


def _number_of_elements(node: fx.Node) -> sympy.Expr:
    """The number of elements of the mask among the node's inputs, else of its first input."""
    values = [source.meta["val"] for source in node.all_input_nodes]
    tensors = [value for value in values if isinstance(value, Tensor)]
    deciding_tensor = next((tensor for tensor in tensors if tensor.dtype is torch.bool), tensors[0])
    return sympy.Mul(*(sympy.sympify(size) for size in deciding_tensor.shape))
