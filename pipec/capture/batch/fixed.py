"""Which numbers of a graph come from the number of its rows: another graph, of the whole batch, tells.

::

    of 2 rows                 of the batch, 8 rows        analysed as of b rows
    view(x, [6, 4])           view(x, [24, 4])            view(x, [3*b, 4])
    arange(12)                arange(12)                  arange(12)
    add(x, 3)                 add(x, 9)                   unclear, for 9 is not 3 * 8 / 2
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from pipec.capture.batch.call import ROWS, tensors_in
from pipec.capture.rewriting import value_of


@dataclass
class Comparison:
    """A graph of ``rows`` rows and one of ``of_batch``, which have the same nodes."""

    rows: int
    of_batch: int
    degrees: dict[float, int] = field(default_factory=dict)
    """The power of the number of rows in numbers of the analysis."""
    grown: set[fx.Node] = field(default_factory=set)
    """The nodes that are called with numbers that come from the number of rows."""
    unclear: set[fx.Node] = field(default_factory=set)
    """Those called with numbers that are others for the batch, and no multiples."""
    _arguments: dict[fx.Node, Any] = field(default_factory=dict)
    _sizes: dict[int, tuple[int, ...] | None] = field(default_factory=dict)

    def arguments(self, node: fx.Node) -> Any:
        """The ``args`` and ``kwargs`` of a node, with numbers as they are in the analysis."""
        return self._arguments.get(node, (node.args, node.kwargs))

    def sizes(self, tensor: Tensor) -> tuple[int, ...] | None:
        """The shape of a captured tensor in the analysis; None if that is unclear."""
        return self._sizes.get(id(tensor), tuple(tensor.shape))

    def add(self, node: fx.Node, other: fx.Node) -> bool:
        """Compare a node with that of the batch. Returns whether they are called alike."""
        mine, theirs = _leaves(node), _leaves(other)
        if len(mine) != len(theirs) or any(map(_differ, mine, theirs)):
            return False
        found = [self._number(x, y) if _is_number(x) else x for x, y in zip(mine, theirs, strict=True)]
        if any(number is None and own is not None for number, own in zip(found, mine, strict=True)):
            self.unclear.add(node)
        elif any(_is_number(own) and number != own for number, own in zip(found, mine, strict=True)):
            self.grown.add(node)
            numbers = iter(found)
            self._arguments[node] = map_aggregate((node.args, node.kwargs), lambda _: next(numbers))
        for own, batch in zip(tensors_in(value_of(node)), tensors_in(value_of(other)), strict=True):
            made = [self._number(x, y) for x, y in zip(own.shape, batch.shape, strict=True)]
            self._sizes[id(own)] = None if None in made else tuple(int(x) for x in made if x is not None)
        return True

    def _number(self, own: float, of_batch: float) -> float | None:
        """A number in the analysis; None if it is no multiple of the number of rows, or of its inverse."""
        if own == of_batch:
            return own
        for power in (1, -1):
            if math.isclose(of_batch, own * (self.of_batch / self.rows) ** power):
                exact = Fraction(own) * Fraction(ROWS, self.rows) ** power
                if isinstance(own, int) and exact.denominator > 1:
                    return None
                number = int(exact) if isinstance(own, int) else float(exact)
                self.degrees[number] = power
                return number
        return None


def compare(module: fx.GraphModule, of_batch: fx.GraphModule, rows: int, all_rows: int) -> Comparison | None:
    """Compare what was captured of a microbatch with what was of the batch; None if they differ."""
    found = Comparison(rows, all_rows)
    pairs = [(module, of_batch)]
    while pairs:
        mine, theirs = pairs.pop()
        nodes, others = list(mine.graph.nodes), list(theirs.graph.nodes)
        if [(x.op, x.target) for x in nodes] != [(x.op, x.target) for x in others]:
            return None
        for node, other in zip(nodes, others, strict=True):
            if not found.add(node, other):
                return None
            if node.op == "get_attr":
                held = [_held(root, str(node.target)) for root in (mine, theirs)]
                if isinstance(held[0], fx.GraphModule) and isinstance(held[1], fx.GraphModule):
                    pairs.append((held[0], held[1]))
                elif not _is_same(*held):
                    return None
    return found


def _leaves(node: fx.Node) -> list[Any]:
    found = list[Any]()
    map_aggregate((node.args, node.kwargs), found.append)
    return found


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _differ(own: Any, of_batch: Any) -> bool:
    """Whether two arguments are no two numbers, nodes of the same name, or equal."""
    if _is_number(own) and _is_number(of_batch):
        return False
    if isinstance(own, fx.Node) and isinstance(of_batch, fx.Node):
        return own.name != of_batch.name
    return type(own) is not type(of_batch) or bool(own != of_batch)


def _held(root: fx.GraphModule, name: str) -> Any:
    held: Any = root
    for part in name.split("."):
        held = getattr(held, part)
    return held


def _is_same(own: Any, of_batch: Any) -> bool:
    if own is of_batch or not isinstance(own, Tensor) or isinstance(own, torch.nn.Parameter):
        return True
    return own.shape == of_batch.shape and own.dtype == of_batch.dtype and bool((own == of_batch).all())
