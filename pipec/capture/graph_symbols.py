"""The symbols of a captured graph: that of the batch, and those of variables."""

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from pipec.capture.model_call import plain_name
from pipec.errors import ArtifactError
from pipec.graph import ModelInput, TrainingGraph, has_data_dependent_size
from pipec.graph.size_text import format_guard, format_size
from pipec.ir import Variable
from pipec.ir.text_format import evaluate_dim, holds
from pipec.torch_compat import pytree
from pipec.torch_compat.differentiation import JointGraph
from pipec.torch_compat.symbolic_numbers import formula


class SpecializedBatchError(Exception):
    """The batch was to be symbolic, but the model makes a constant of it."""


class SpecializedVariableError(Exception):
    """A variable was to be symbolic, but the model makes it a constant or equal to another size.

    ``name`` is that of the variable; empty if it is not known which of several it is.
    """

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name


def batch_symbol(arguments: Sequence[fx.Node], specialized_by: str) -> sympy.Symbol:
    """The symbol of the batch. Raises SpecializedBatchError if a line of the model made it a number."""
    for node in arguments:
        role = node.meta["role"]
        if isinstance(role, ModelInput) and role.batched:
            size = formula(node.meta["val"].shape[0])
            if isinstance(size, sympy.Symbol):
                return size
    raise SpecializedBatchError(f"the batch becomes a constant in {specialized_by}")


def number_values(captured: fx.Graph, variables: Sequence[Variable]) -> dict[str, list[Any]]:
    """The symbolic value of each number that an argument holds in a 0-dim tensor, by name."""
    paths = {plain_name(variable.path): variable.name for variable in variables if variable.dim is None}
    found: dict[str, list[Any]] = {}
    for node in captured.find_nodes(op="placeholder"):
        if name := paths.get(plain_name(str(node.target))):
            found[name] = [user.meta["example_value"] for user in node.users]
    return found


def number_symbols(joint: fx.Graph) -> set[sympy.Symbol]:
    """The symbols of numbers among the arguments."""
    read = joint.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default)
    return {node.meta["val"].node.expr for node in read if node.all_input_nodes[0].op == "placeholder"}


def variable_symbols(
    arguments: Sequence[fx.Node],
    batch: sympy.Symbol | None,
    variables: Sequence[Variable],
    numbers: Mapping[str, Sequence[Any]],
    joint: JointGraph,
) -> dict[sympy.Symbol, str]:
    """The symbols of variables, and their names. A number has one in the forward graph, and one in ``joint``.

    Raises:
        SpecializedVariableError: the model made a number of one, or one of two, or nothing shows that it did
        not.
    """
    nodes = {x.meta["role"].position: x for x in arguments if isinstance(x.meta["role"], ModelInput)}
    found: dict[sympy.Symbol, str] = {}
    for variable in variables:
        argument = nodes.get(variable.position)
        values = [*numbers.get(variable.name, ()), *_values(argument, variable.dim)]
        for symbol in map(formula, values):
            if not isinstance(symbol, sympy.Symbol):
                raise SpecializedVariableError(
                    f"{variable.what} becomes a constant in {joint.specialized_by}", variable.name
                )
            if found.setdefault(symbol, variable.name) != variable.name or symbol == batch:
                raise SpecializedVariableError(
                    f"the model needs {variable.what} to be as large as another one", variable.name
                )
    read, sizes = {*found.values()}, {variable.name for variable in variables if variable.dim is not None}
    for variable in variables:
        shown = variable.name in read if variable.name in sizes else numbers.get(variable.name)
        if not shown or any(value.is_number for value in joint.replacements.values()):
            where = joint.specialized_by or "the model, or nothing reads it"
            raise SpecializedVariableError(
                f"{variable.what} becomes a constant in {where}", "" if shown else variable.name
            )
    return found


def _values(argument: fx.Node | None, dim: int | None) -> list[Any]:
    """The values in a joint graph for a dimension of an argument, or for the number in it."""
    if argument is None or not isinstance(argument.meta.get("val"), Tensor):
        return []
    if dim is not None:
        return [argument.meta["val"].shape[dim]]
    return [user.meta["val"] for user in argument.users if user.op == "call_function"]


def check_evaluable(graph: TrainingGraph) -> None:
    """Raise SpecializedVariableError unless ranks can work out every shape and condition from the sizes.

    Without variables, raise SpecializedBatchError.
    """
    tensors = [
        node.meta["val"]
        for node in graph.module.graph.nodes
        if isinstance(node.meta.get("val"), Tensor) and not has_data_dependent_size(node)
    ]
    shapes = {formula(size) for tensor in tensors for size in tensor.shape}
    fixed = [node for node in graph.nodes if not has_data_dependent_size(node)]
    read = [x for node in fixed for x in pytree.tree_leaves((node.args, node.kwargs))]
    sizes = {"b": graph.batch_size, **graph.planned_sizes}
    try:
        for size in shapes:
            evaluate_dim(format_size(size, graph.symbols), sizes)
        for guard in graph.guards:
            if guard.free_symbols & {*graph.variable_symbols}:
                holds(format_guard(guard, graph.symbols), sizes)
        for expression in {x for x in read if isinstance(x, sympy.Basic)}:
            format_size(expression, graph.symbols)
    except (ArtifactError, AssertionError, NotImplementedError, TypeError) as error:
        kind = SpecializedVariableError if graph.variables else SpecializedBatchError
        raise kind(f"no stage can follow what depends on it: {error}") from None
