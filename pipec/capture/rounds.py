"""What a captured graph knows of the round that its collectives join, for the walk of ``add_up``.

What ``all_gather`` makes of rows has the rows of every replica: those of the whole batch, if a step is one
round. Whatever depends on where a replica's own rows stand among them would be right on the first replica
alone, and is refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from pipec.capture.joins import BROADCASTS, JOINS, REDUCES
from pipec.capture.parts import ARITHMETIC, Part, operator_name, place_of
from pipec.errors import InputError

_NUMBERING = {"arange", "eye", "linspace", "range"}
"""Operators whose result says which row is which."""

_FINDING = {"argmax", "argmin", "argsort", "max", "min", "multinomial", "searchsorted", "sort", "topk"}
"""Operators that say where something is."""

_DIAGONAL = {"diag", "diag_embed", "diagonal", "trace", "tril", "triu"}

_PARTS = {
    *("chunk", "getitem", "index_select", "narrow", "reshape", "roll", "select", "slice", "split"),
    *("tensor_split", "unflatten", "view"),
}
"""Operators that take a part of a tensor, or tell parts of it."""

_INTERLEAVING = {"cat", "concat", "concatenate", "hstack", "vstack", "repeat", "tile"}
"""Operators that put rows of a microbatch behind others: of microbatches together, they are in turns."""

_LOOKUPS = {"embedding", "gather", "getitem", "index", "index_select", "take", "take_along_dim"}


@dataclass
class Rounds:
    """What is known of the nodes visited so far. With one replica, collectives do nothing.

    Args:
        size: The rows of the microbatch if the graph is for these alone, else 0.
        symbol: The rows of the microbatch, if they are a symbol.
    """

    graph: fx.Graph
    num_replicas: int
    size: int
    symbol: sympy.Symbol | None
    sizes: set[Any] = field(default_factory=set)
    """How many rows a round has, in the symbol of the batch."""
    _gathered: set[fx.Node] = field(default_factory=set)
    _joined: set[fx.Node] = field(default_factory=set)
    _numbering: set[fx.Node] = field(default_factory=set)
    _found: set[fx.Node] = field(default_factory=set)
    _interleaved: set[fx.Node] = field(default_factory=set)

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
        """The sizes of dimensions of a node that are the rows of a round; none if it has no such."""
        return self.sizes if node in self._gathered else ()

    def is_join(self, node: fx.Node) -> bool:
        return self.num_replicas > 1 and node.target in JOINS

    def join(self, node: fx.Node, part: Part) -> Part:
        """What a collective makes of a value that is ``part`` of the batch's.

        Raises:
            InputError: replicas gather the numbers of their own rows.
        """
        source = node.all_input_nodes[0]
        if source in self._numbering:
            raise InputError(_refusal(node))
        self._joined.add(node)
        if node.target in REDUCES:
            return Part.SAME if part is Part.SUM else Part.OTHER
        if node.target in BROADCASTS:
            return Part.SAME if part is Part.SAME else Part.OTHER
        if part is not Part.ROWS or not self._is_rows(_value(source).shape[0]):
            return Part.OTHER
        self._gathered.add(node)
        self._interleaved |= {node} if source in self._interleaved else set()
        self.sizes.add(size_of(_value(node).shape[0]))
        return Part.SAME

    def follow(self, node: fx.Node, parts: Mapping[fx.Node, Part]) -> None:
        """Note what a call makes of what was joined. ``parts`` say what it reads.

        Raises:
            InputError: it depends on where the replica's own rows are among those of the round.
        """
        value, name = _value(node), operator_name(node)
        gathered = any(source in self._gathered for source in parts)
        if (gathered and self._needs_place(node, parts)) or self._looks_up_own(name, parts):
            raise InputError(_refusal(node))
        if gathered and (not isinstance(value, Tensor) or self._has_rows_of_round(value)):
            self._gathered.add(node)
        if any(source in self._joined for source in parts):
            self._joined.add(node)
        counts = Part.SIZE in parts.values() or (isinstance(value, Tensor) and self._has_fixed_rows(value))
        if (name in _NUMBERING and counts) or any(source in self._numbering for source in parts):
            self._numbering.add(node)
        rows = isinstance(value, Tensor) and any(part is Part.ROWS for part in parts.values())
        if (rows and name in _INTERLEAVING) or any(source in self._interleaved for source in parts):
            self._interleaved.add(node)
        found = any(source in self._found for source in parts) and name not in _LOOKUPS - {"getitem"}
        if (gathered and name in _FINDING) or (found and not _is_real(value)):
            self._found.add(node)

    def shapes(self, node: fx.Node) -> Collection[fx.Node]:
        """The numbers that a call reads as the rows of a round: to give a tensor that has them a shape."""
        sources = node.all_input_nodes
        if operator_name(node) in ARITHMETIC or not any(source in self._gathered for source in sources):
            return ()
        return [x for x in sources if size_of(_value(x)) in self.sizes]

    def _needs_place(self, node: fx.Node, parts: Mapping[fx.Node, Part]) -> bool:
        """Whether a call of gathered rows depends on which of them are the replica's own, or on their order
        where that is another one in the batch.
        """
        name = operator_name(node)
        interleaved = any(source in self._gathered & self._interleaved for source in parts)
        own = [x for x, part in parts.items() if part is Part.SIZE and size_of(_value(x)) not in self.sizes]
        numbered = any(source in self._numbering for source in parts)
        takes_part = bool(own) or (interleaved and not _takes_all(node))
        return numbered or name in _DIAGONAL or (name in _PARTS and takes_part)

    def _looks_up_own(self, name: str, parts: Mapping[fx.Node, Part]) -> bool:
        """Whether a call looks up the replica's own rows by places among those of the round."""
        found = [source for source in parts if source in self._found and isinstance(_value(source), Tensor)]
        others = [source for source in parts if source not in self._found and source not in self._gathered]
        return bool(found) and name in _LOOKUPS and any(parts[source] is Part.ROWS for source in others)

    def _is_rows(self, size: int | torch.SymInt) -> bool:
        if isinstance(size, torch.SymInt):
            return self.symbol in size.node.expr.free_symbols
        return self.size > 0 and size % self.size == 0

    def _has_rows_of_round(self, value: Tensor) -> bool:
        return any(size_of(size) in self.sizes for size in tuple[Any, ...](value.shape))

    def _has_fixed_rows(self, value: Tensor) -> bool:
        rows = value.shape[0] if self.size > 0 and value.ndim > 0 else None
        return isinstance(rows, int) and rows % self.size == 0


def _takes_all(node: fx.Node) -> bool:
    """Whether a call is ``x[:, None]`` and the like, that only adds dimensions."""
    index = node.args[1] if operator_name(node) == "getitem" else 0
    return all(
        item in (None, Ellipsis, slice(None)) for item in (index if isinstance(index, tuple) else (index,))
    )


def size_of(size: Any) -> Any:
    """The formula of a dimension, or its number."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _value(node: fx.Node) -> Any:
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _refusal(node: fx.Node) -> str:
    return (
        f"{place_of(node)} depends on where a replica's own rows are among "
        "those of all replicas, which it does not know: they are the first ones on the first replica alone. "
        "Compute what belongs to a row from the row itself, as in (queries * keys).sum(1), or give step() a "
        "tensor that numbers the rows, and compare it with all_gather of it"
    )
