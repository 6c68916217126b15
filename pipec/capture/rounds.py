"""What a captured graph knows of the round that its collectives join, for the walk of ``add_up``.

What ``all_gather`` makes of rows has the rows of every replica: those of the whole batch, if a step is one
round. Whatever depends on where a replica's own rows stand among them would be right on the first replica
alone, and is refused.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from pipec.capture.joins import BROADCASTS, JOINS, REDUCES
from pipec.capture.parts import ARITHMETIC, Part, operator_name, place_of
from pipec.errors import InputError

_NUMBERING = {"arange", "eye", "linspace", "range"}
"""Operators whose result says which row is which."""

_DIAGONAL = {"diag", "diag_embed", "diagonal", "trace", "tril", "triu"}

_PARTS = {
    *("chunk", "getitem", "index_select", "narrow", "reshape", "roll", "select", "slice", "split"),
    *("tensor_split", "unflatten", "view"),
}
"""Operators that with a number of rows take a part of a tensor."""


@dataclass
class Rounds:
    """What is known of the nodes visited so far. With one replica, collectives do nothing.

    Args:
        size: The rows of the microbatch if the graph is for these alone, else 0.
    """

    graph: fx.Graph
    num_replicas: int
    size: int
    sizes: set[Any] = field(default_factory=set)
    """How many rows a round has, in the symbol of the batch."""
    _gathered: set[fx.Node] = field(default_factory=set)
    _joined: set[fx.Node] = field(default_factory=set)
    _numbering: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._leading: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            if node.target in JOINS or any(user in self._leading for user in node.users):
                self._leading.add(node)

    def leads_to_join(self, node: fx.Node) -> bool:
        """Whether replicas join what the node makes, so that each must have its own."""
        return node in self._leading

    def is_joined(self, node: fx.Node) -> bool:
        """Whether the value is the same for every microbatch of a round, and may be another in the next."""
        return node in self._joined

    def rows_of_round(self, node: fx.Node) -> Collection[Any]:
        """The sizes of dimensions of a node that are the rows of a round."""
        return self.sizes if node in self._gathered else ()

    def is_join(self, node: fx.Node) -> bool:
        return self.num_replicas > 1 and node.target in JOINS

    def join(self, node: fx.Node, source: Part, num_batches: int) -> Part:
        """What a collective makes of a value that is ``source`` to the batch."""
        self._joined.add(node)
        if node.target in REDUCES:
            return Part.SAME if source is Part.SUM else Part.OTHER
        if node.target in BROADCASTS:
            return Part.SAME if source is Part.SAME else Part.OTHER
        value = _value(node)
        if source is not Part.ROWS or num_batches != 1 or value.shape[0] == self.num_replicas:
            return Part.OTHER
        self._gathered.add(node)
        self.sizes.add(size_of(value.shape[0]))
        return Part.SAME

    def follow(self, node: fx.Node, numbers: Collection[fx.Node]) -> None:
        """Note what a call makes of what was joined. ``numbers`` are those of rows that it reads.

        Raises:
            InputError: it depends on where the replica's own rows are among those of the round.
        """
        sources = node.all_input_nodes
        gathered = any(source in self._gathered for source in sources)
        value, name = _value(node), operator_name(node)
        own = [number for number in numbers if size_of(_value(number)) not in self.sizes]
        if gathered and (
            any(source in self._numbering for source in sources)
            or name in _DIAGONAL
            or (own and name in _PARTS)
        ):
            raise InputError(_refusal(node))
        if gathered and (not isinstance(value, Tensor) or self._has_rows_of_round(value)):
            self._gathered.add(node)
        if any(source in self._joined for source in sources):
            self._joined.add(node)
        numbered = name in _NUMBERING and (numbers or self._has_fixed_rows(value))
        if numbered or any(source in self._numbering for source in sources):
            self._numbering.add(node)

    def shapes(self, node: fx.Node) -> Collection[fx.Node]:
        """The numbers that a call reads as the rows of a round: to give a tensor that has them a shape."""
        sources = node.all_input_nodes
        if operator_name(node) in ARITHMETIC or not any(source in self._gathered for source in sources):
            return ()
        return [x for x in sources if size_of(_value(x)) in self.sizes]

    def _has_rows_of_round(self, value: Tensor) -> bool:
        return any(size_of(size) in self.sizes for size in tuple[Any, ...](value.shape))

    def _has_fixed_rows(self, value: Any) -> bool:
        rows = value.shape[0] if isinstance(value, Tensor) and value.ndim else None
        return isinstance(rows, int) and self.size > 0 and rows % self.size == 0


def size_of(size: Any) -> Any:
    """The formula of a dimension, or its number."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _value(node: fx.Node) -> Any:
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def _refusal(node: fx.Node) -> str:
    return (
        f"{place_of(node)} depends on where a replica's own rows are among "
        "those of all replicas, which it does not know: they are the first ones on the first replica alone. "
        "Compute what belongs to a row from the row itself, as in (queries * keys).sum(1), or give step() a "
        "tensor that numbers the rows, and compare it with all_gather of it"
    )
