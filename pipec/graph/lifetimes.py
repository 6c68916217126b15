"""The lifetimes of values: within a function, where generated code deletes them, and between functions.

A value is a name for memory. The node that allocates the memory owns it. A view is another name for it, and
keeps all of it alive. Memory that no function allocates is not counted here: parameters and buffers, inputs,
and received values.
"""

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from pipec.graph.in_place import in_place_operands, owns_new_storage
from pipec.graph.nodes import is_tensor, is_view, storage_owner
from pipec.primitives import cross_entropy_gradient, rows_per_block

_aten = torch.ops.aten

LOSSES_WITH_TEMPORARIES = (
    _aten.binary_cross_entropy.default,
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.soft_margin_loss.default,
)
"""Losses whose kernels allocate a number for each element; measured on CPUs with torch 2.13."""

BytesOf = Callable[[fx.Node], int]
"""The bytes of a node's value."""

OwnerOf = Callable[[fx.Node], fx.Node]
"""The owner of the memory behind a value."""


@dataclass(frozen=True, slots=True)
class FunctionMemory:
    """Bytes that a microbatch holds before a function, at its peak while it runs, and after it."""

    before: int
    peak: int
    after: int


def storage_owners(nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """The nodes that own the memory of these values, each once, if a function allocates it."""
    return frozenset(owner for owner in map(storage_owner, nodes) if owns_new_storage(owner))


def storage_bytes(nodes: Iterable[fx.Node], bytes_of: BytesOf) -> int:
    """The bytes of these values. A view counts as all of the memory behind it, and memory counts once."""
    return sum(map(bytes_of, storage_owners(nodes)))


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of a function, the owners of the memory that it allocates, and what is deleted after it.

    Nothing reads the memory of the ``deleted`` values later, and ``freed`` has its owners. Memory is freed
    when the last of its names is deleted. Names for memory that no function allocates may stay.
    """

    node: fx.Node
    allocated: tuple[fx.Node, ...]
    deleted: tuple[fx.Node, ...]
    freed: frozenset[fx.Node]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """The memory of the values of a function, whatever their sizes.

    ``saved_in`` and ``saved_out`` are the owners of the memory that is saved before it and after it, and
    ``in_place`` has the operands into which statements write their results.
    """

    body: frozenset[fx.Node]
    saved_in: frozenset[fx.Node]
    statements: tuple[Statement, ...]
    saved_out: frozenset[fx.Node]
    in_place: Mapping[fx.Node, fx.Node]

    @classmethod
    def of(
        cls,
        body: Sequence[fx.Node],
        saved_in: Sequence[fx.Node],
        saved_out: Sequence[fx.Node],
        results: Sequence[fx.Node],
    ) -> "Lifetimes":
        """The lifetimes in a function that computes ``body``. ``results`` include what is saved after it."""
        in_place, nodes = in_place_operands(body, saved_in, results), frozenset(body)
        owner_of = _owners_with(in_place)
        deleted = _deleted(body, saved_in, results, owner_of)
        statements = tuple(
            Statement(
                node,
                tuple(x for x in defined_by(node, nodes) if owner_of(x) is x and owns_new_storage(x)),
                tuple(deleted.get(node, ())),
                storage_owners(map(owner_of, deleted.get(node, ()))),
            )
            for node in filter(is_statement, body)
        )
        after = storage_owners(map(owner_of, saved_out))
        return cls(nodes, storage_owners(saved_in), statements, after, in_place)

    def memory(self, bytes_of: BytesOf) -> FunctionMemory:
        """The memory of a microbatch's values around the function, and the most while a statement runs."""
        before = peak = live = sum(map(bytes_of, self.saved_in))
        for statement in self.statements:
            live += sum(map(bytes_of, statement.allocated))
            peak = max(peak, live + temporary_bytes(statement.node, self.body, bytes_of))
            live -= sum(map(bytes_of, statement.freed))
        return FunctionMemory(before, peak, sum(map(bytes_of, self.saved_out)))


def _deleted(
    body: Sequence[fx.Node],
    saved_in: Sequence[fx.Node],
    results: Sequence[fx.Node],
    owner_of: OwnerOf,
) -> dict[fx.Node, list[fx.Node]]:
    """The tensors to delete after each statement of a function, because nothing reads their memory later."""
    nodes, returned = {*body}, set(map(owner_of, results))
    last: dict[fx.Node, fx.Node] = {}
    names: dict[fx.Node, list[fx.Node]] = {}
    for value in saved_in:
        names.setdefault(owner_of(value), []).append(value)
    for node in filter(is_statement, body):
        defined = list(defined_by(node, nodes))
        for value in defined:
            names.setdefault(owner_of(value), []).append(value)
        last |= dict.fromkeys(map(owner_of, (*filter(is_tensor, node.all_input_nodes), *defined)), node)
    deleted: dict[fx.Node, list[fx.Node]] = {}
    for owner, node in last.items():
        if owner in names and owner not in returned and owns_new_storage(owner):
            deleted.setdefault(node, []).extend(names[owner])
    return deleted


def _owners_with(written: Mapping[fx.Node, fx.Node]) -> OwnerOf:
    """Finds the owner of a value's memory, in a function that writes some values into operands."""

    def owner_of(node: fx.Node) -> fx.Node:
        while (owner := storage_owner(node)) in written:
            node = written[owner]
        return owner

    return owner_of


def temporary_bytes(node: fx.Node, read: Container[fx.Node], bytes_of: BytesOf) -> int:
    """The bytes of a statement's results that get no name: the items of its tuple that are not in ``read``.

    For losses it is the bytes that their kernels allocate, for each element or for some rows at a time.
    """
    if node.target in LOSSES_WITH_TEMPORARIES and not node.meta["val"].dim():
        return bytes_of(node.all_input_nodes[0])
    if node.target is cross_entropy_gradient:
        num_classes, itemsize = int(node.meta["val"].shape[1]), int(node.meta["val"].itemsize)
        return min(bytes_of(node), rows_per_block(num_classes, itemsize) * num_classes * itemsize)
    if not num_items(node) or is_view(node):
        return 0
    return max(bytes_of(node) - sum(map(bytes_of, defined_by(node, read))), 0)


def is_statement(node: fx.Node) -> bool:
    """Whether the node has its own statement. An item of a tuple has none: unpacking names it."""
    return node.target is not operator.getitem


def num_items(node: fx.Node) -> int:
    """The number of items of the node's value; 0 unless it is a tuple."""
    value = node.meta.get("val")
    return len(value) if isinstance(value, list | tuple) else 0


def defined_by(node: fx.Node, read: Container[fx.Node]) -> Iterator[fx.Node]:
    """The tensors that a statement names: the node itself, or the items of its tuple that are in ``read``."""
    if is_tensor(node):
        yield node
    elif num_items(node):
        yield from (each for each in node.users if each.target is operator.getitem and each in read)
