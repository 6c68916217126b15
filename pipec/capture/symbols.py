"""The symbols of a captured graph: that of the batch, and those of variables."""

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from pipec.errors import ArtifactError
from pipec.graph import ModelInput, TrainingGraph
from pipec.graph.dimensions import condition, dimension
from pipec.ir import Variable
from pipec.ir.text import evaluate_dim, holds
from pipec.torch_compat import pytree


class FixedBatchError(Exception):
    """The batch was to be symbolic, but the model makes a constant of it."""


class FixedVariableError(Exception):
    """A variable was to be symbolic, but the model makes a constant of it, or of it and another size one."""


def batch_symbol(arguments: Sequence[fx.Node], fixed_by: str) -> sympy.Symbol:
    """The symbol of the batch. Raises FixedBatchError if a line of the model made it a number."""
    for node in arguments:
        role = node.meta["role"]
        if isinstance(role, ModelInput) and role.batched:
            size = _expression(node.meta["val"].shape[0])
            if isinstance(size, sympy.Symbol):
                return size
    raise FixedBatchError(f"the batch becomes a constant in {fixed_by}")


def variable_symbols(
    arguments: Sequence[fx.Node], variables: Sequence[Variable], batch: sympy.Symbol | None, fixed_by: str
) -> dict[sympy.Symbol, str]:
    """The symbol of each variable, and its name. One that the model never reads has a symbol all the same.

    Raises:
        FixedVariableError: the model made a number of one, or made one of two symbols.
    """
    nodes = {x.meta["role"].position: x for x in arguments if isinstance(x.meta["role"], ModelInput)}
    found: dict[str, sympy.Symbol] = {}
    for variable in variables:
        for size in _values(nodes.get(variable.position), variable.dim):
            symbol = _expression(size)
            if not isinstance(symbol, sympy.Symbol) or found.setdefault(variable.name, symbol) != symbol:
                what = (
                    variable.path if variable.dim is None else f"dimension {variable.dim} of {variable.path}"
                )
                raise FixedVariableError(f"{what} becomes a constant in {fixed_by}")
    if len({*found.values()} - {batch}) < len(found):
        raise FixedVariableError("the model needs sizes to be the same that need not be")
    names = dict.fromkeys(variable.name for variable in variables)
    return {found.get(name, sympy.Symbol(f"unread_{name}")): name for name in names}


def _values(argument: fx.Node | None, dim: int | None) -> list[Any]:
    """What a joint graph has for a dimension of an argument, or for the number in it; empty if nothing."""
    if argument is None or not isinstance(argument.meta.get("val"), Tensor):
        return []
    if dim is not None:
        return [argument.meta["val"].shape[dim]]
    return [user.meta["val"] for user in argument.users]


def number_symbols(graph: fx.Graph) -> Iterator[sympy.Symbol]:
    """The symbols of numbers that are found in arguments."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default):
        if node.all_input_nodes[0].op == "placeholder":
            yield node.meta["val"].node.expr


def check_readable(graph: TrainingGraph) -> None:
    """Raise FixedVariableError unless ranks can work out every shape and condition from the variables."""
    tensors = [
        node.meta["val"] for node in graph.module.graph.nodes if isinstance(node.meta.get("val"), Tensor)
    ]
    shapes = {_expression(size) for tensor in tensors for size in tensor.shape}
    read = [x for node in graph.nodes for x in pytree.tree_leaves((node.args, node.kwargs))]
    sizes = {"b": graph.batch_size, **graph.planned}
    try:
        for size in shapes:
            evaluate_dim(dimension(size, graph.symbols), sizes)
        for guard in graph.guards:
            holds(condition(guard, graph.symbols), sizes)
        for formula in {x for x in read if isinstance(x, sympy.Basic)}:
            dimension(formula, graph.symbols)
    except (ArtifactError, AssertionError, NotImplementedError, TypeError) as error:
        raise FixedVariableError(f"no stage can follow what depends on it: {error}") from None


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat) else size
