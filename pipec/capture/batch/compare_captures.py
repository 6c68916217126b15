"""Tells which numbers of a graph come from the number of its rows, by a second capture of the whole batch.

::

    of 2 rows                 of the batch, 8 rows        analysed as of b rows
    view(x, [6, 4])           view(x, [24, 4])            view(x, [3*b, 4])
    arange(12)                arange(12)                  arange(12)
    add(x, 3)                 add(x, 9)                   unclear, for 9 is not 3 * 8 / 2
"""

import math
import operator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from pipec.capture.batch.operator_call import ROW_COUNT_PRIME, tensors_in
from pipec.capture.node_insertion import fake_value


@dataclass(frozen=True)
class WholeBatchCapture:
    """The graph captured of the whole batch, which has ``batch_size`` rows; None if that failed.

    The graph to compare it with is for ``rows`` rows alone.
    """

    module: fx.GraphModule | None
    rows: int
    batch_size: int

    def compare(self, module: fx.GraphModule) -> "Comparison | None":
        """The comparison of a graph of ``rows`` rows with that of the batch; None if their nodes differ."""
        if self.module is None:
            return None
        found = Comparison(self.rows, self.batch_size)
        pairs = [(module, self.module)]
        while pairs:
            mine, theirs = pairs.pop()
            nodes, others = list(mine.graph.nodes), list(theirs.graph.nodes)
            if [(x.op, x.target) for x in nodes] != [(x.op, x.target) for x in others]:
                return None
            for node, other in zip(nodes, others, strict=True):
                if not found.add(node, other):
                    return None
                if node.op == "get_attr":
                    own, of_batch = (operator.attrgetter(str(node.target))(root) for root in (mine, theirs))
                    if isinstance(own, fx.GraphModule):
                        pairs.append((own, of_batch))
                    elif not _is_same(own, of_batch):
                        return None
        return found

    def why_unproven(self) -> str:
        """The warning where no comparison is possible."""
        return (
            f"it is captured for {self.rows} rows alone, and differently for {self.batch_size}, so that "
            "nothing tells which of its numbers come from the rows"
        )


@dataclass
class Comparison:
    """A graph of ``rows`` rows and one of ``batch_size`` rows, which have the same nodes."""

    rows: int
    batch_size: int
    degrees: dict[float, int] = field(default_factory=dict)
    """The power of the number of rows in numbers of the analysis."""
    scaled: set[fx.Node] = field(default_factory=set)
    """The nodes that are called with numbers that come from the number of rows."""
    unclear: set[fx.Node] = field(default_factory=set)
    """Those called with numbers that are others for the batch, and no multiples."""
    _arguments: dict[fx.Node, Any] = field(default_factory=dict)
    _shapes: dict[int, tuple[int, ...] | None] = field(default_factory=dict)

    def arguments(self, node: fx.Node) -> Any:
        """The ``args`` and ``kwargs`` of a node, their numbers scaled to the sizes of the analysis."""
        return self._arguments.get(node, (node.args, node.kwargs))

    def shape(self, tensor: Tensor) -> tuple[int, ...] | None:
        """The shape of a captured tensor, scaled to the sizes of the analysis; None if that is unclear."""
        return self._shapes.get(id(tensor), tuple(tensor.shape))

    def add(self, node: fx.Node, other: fx.Node) -> bool:
        """Compare a node with that of the batch. Returns whether they differ in numbers alone."""
        mine, theirs = _leaves(node), _leaves(other)
        if len(mine) != len(theirs) or any(map(_differ, mine, theirs)):
            return False
        pairs = [*zip(mine, theirs, strict=True)]
        found = [self._scale(own, batch) if _is_number(own) else own for own, batch in pairs]
        if any(number is None and own is not None for number, own in zip(found, mine, strict=True)):
            self.unclear.add(node)
        elif any(_is_number(own) and own != batch for own, batch in pairs):
            self.scaled.add(node)
            numbers = iter(found)
            self._arguments[node] = map_aggregate((node.args, node.kwargs), lambda _: next(numbers))
        for tensor, larger in zip(tensors_in(fake_value(node)), tensors_in(fake_value(other)), strict=True):
            sizes = [self._scale(own, batch) for own, batch in zip(tensor.shape, larger.shape, strict=True)]
            self._shapes[id(tensor)] = (
                None if None in sizes else tuple(int(x) for x in sizes if x is not None)
            )
        return True

    def _scale(self, number: float, of_batch: float) -> float | None:
        """A number scaled to the sizes of the analysis; None if it is no power of the rows."""
        if number == of_batch:
            return number
        for power in (1, -1):
            if math.isclose(of_batch, number * (self.batch_size / self.rows) ** power):
                exact = Fraction(number) * Fraction(ROW_COUNT_PRIME, self.rows) ** power
                if isinstance(number, int) and exact.denominator > 1:
                    return None
                scaled = int(exact) if isinstance(number, int) else float(exact)
                self.degrees[scaled] = power
                return scaled
        return None


def _leaves(node: fx.Node) -> list[Any]:
    found = list[Any]()
    map_aggregate((node.args, node.kwargs), found.append)
    return found


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float) and not isinstance(leaf, bool)


def _differ(own: Any, of_batch: Any) -> bool:
    """Whether two arguments differ, and are not two numbers."""
    if _is_number(own) and _is_number(of_batch):
        return False
    if isinstance(own, fx.Node) and isinstance(of_batch, fx.Node):
        return own.name != of_batch.name
    return type(own) is not type(of_batch) or bool(own != of_batch)


def _is_same(own: Any, of_batch: Any) -> bool:
    if own is of_batch or not isinstance(own, Tensor) or isinstance(own, nn.Parameter):
        return True
    return own.shape == of_batch.shape and own.dtype == of_batch.dtype and bool((own == of_batch).all())
