"""The symbols of a captured graph: that of the batch, and those of lengths."""

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from pipec.errors import ArtifactError
from pipec.graph import ModelInput, TrainingGraph
from pipec.graph.dimensions import condition, dimension
from pipec.ir import Length
from pipec.ir.text import evaluate_dim, holds


class FixedBatchError(Exception):
    """The batch was to be symbolic, but the model makes a constant of it."""


class FixedLengthError(Exception):
    """A length was to be symbolic, but the model makes a constant of it, or of it and another size one."""


def batch_symbol(arguments: Sequence[fx.Node], fixed_by: str) -> sympy.Symbol:
    """The symbol of the batch. Raises FixedBatchError if a line of the model made it a number."""
    for node in arguments:
        role = node.meta["role"]
        if isinstance(role, ModelInput) and role.batched:
            size = _expression(node.meta["val"].shape[0])
            if isinstance(size, sympy.Symbol):
                return size
    raise FixedBatchError(f"the batch becomes a constant in {fixed_by}")


def length_symbols(
    arguments: Sequence[fx.Node], lengths: Sequence[Length], batch: sympy.Symbol | None, fixed_by: str
) -> dict[sympy.Symbol, str]:
    """The symbol of each length, and its name. One that the model never reads has a symbol all the same.

    Raises:
        FixedLengthError: the model made a number of one, or made one of two symbols.
    """
    shapes = {
        node.meta["role"].position: node.meta["val"].shape
        for node in arguments
        if isinstance(node.meta["role"], ModelInput) and isinstance(node.meta.get("val"), Tensor)
    }
    found: dict[str, sympy.Symbol] = {}
    for length in lengths:
        if length.position in shapes:
            symbol = _expression(shapes[length.position][length.dim])
            if not isinstance(symbol, sympy.Symbol) or found.setdefault(length.name, symbol) != symbol:
                what = f"dimension {length.dim} of {length.path}"
                raise FixedLengthError(f"{what} becomes a constant in {fixed_by}")
    if len({*found.values()} - {batch}) < len(found):
        raise FixedLengthError("the model needs sizes to be the same that need not be")
    names = dict.fromkeys(length.name for length in lengths)
    return {found.get(name, sympy.Symbol(f"unread_{name}")): name for name in names}


def check_readable(graph: TrainingGraph) -> None:
    """Raise FixedLengthError unless ranks can work out every shape and every condition from the sizes."""
    tensors = [
        node.meta["val"] for node in graph.module.graph.nodes if isinstance(node.meta.get("val"), Tensor)
    ]
    shapes = {_expression(size) for tensor in tensors for size in tensor.shape}
    sizes = {"b": graph.batch_size, **graph.planned}
    try:
        for size in shapes:
            evaluate_dim(dimension(size, graph.symbols), sizes)
        for guard in graph.guards:
            holds(condition(guard, graph.symbols), sizes)
    except ArtifactError as error:
        raise FixedLengthError(f"a stage cannot follow how shapes depend on it: {error}") from None


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
