"""The lifetimes of values: within a function, where generated code deletes them, and between functions.

A value is a name for memory. The node that made the memory owns it; a view is another name for it, and keeps
all of it alive. Tensors that a stage holds anyway, and what it was given or has received, lie in memory
of their own and are not counted here.
"""

import operator
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from pipec.graph.in_place import in_place_operands, owns_new_storage
from pipec.graph.nodes import is_tensor, is_view, storage_owner
from pipec.graph.phase_functions import PhaseFunction
from pipec.primitives import cross_entropy_gradient, rows_per_block

_aten = torch.ops.aten

LOSSES_WITH_TEMPORARIES = (
    _aten.binary_cross_entropy.default,
    _aten.mse_loss.default,
    _aten.smooth_l1_loss.default,
    _aten.soft_margin_loss.default,
)
"""Losses whose kernels make a number for each element first; measured on CPUs with torch 2.13."""

BytesOf = Callable[[fx.Node], int]
"""The bytes of a node's value."""


@dataclass(frozen=True, slots=True)
class FunctionMemory:
    """Bytes that a microbatch holds before a function runs, at most while it runs, and after it."""

    before: int
    peak: int
    after: int


def storage_owners(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that own the memory of these values, each once, without tensors that are held anyway."""
    return {owner for owner in map(storage_owner, nodes) if owns_new_storage(owner)}


def storage_bytes(nodes: Iterable[fx.Node], bytes_of: BytesOf) -> int:
    """The bytes of these values: views are free, and the memory behind them counts whole."""
    return sum(map(bytes_of, storage_owners(nodes)))


def function_memory(function: PhaseFunction, bytes_of: BytesOf) -> FunctionMemory:
    """The memory of a microbatch's values while a function runs and deletes what is ``dead_after``."""
    before = storage_bytes(function.saved_in, bytes_of)
    peak = max((saved + made for _, saved, made in live_bytes(function, bytes_of)), default=0)
    after = storage_bytes(map(storage_owners_in(function), function.saved_out), bytes_of)
    return FunctionMemory(before, max(before, peak), after)


def live_bytes(function: PhaseFunction, bytes_of: BytesOf) -> Iterator[tuple[fx.Node, int, int]]:
    """Each statement of a function, with what is held while it runs: of what was saved, and of what was made.

    The first are bytes of values that came saved and are not ``dead_after`` before, the second of all others.
    """
    memory, gone, body = storage_owners_in(function), dead_after(function), {*function.body}
    came = storage_owners(function.saved_in)
    saved, made = sum(map(bytes_of, came)), 0
    for node in filter(is_statement, function.body):
        new = [each for each in defined_by(node, body) if memory(each) is each and owns_new_storage(each)]
        made += sum(map(bytes_of, new))
        yield node, saved, made + temporary_bytes(node, body, bytes_of)
        for owner in storage_owners(map(memory, gone.get(node, ()))):
            if owner in came:
                saved -= bytes_of(owner)
            else:
                made -= bytes_of(owner)


def dead_after(function: PhaseFunction) -> dict[fx.Node, list[fx.Node]]:
    """For each statement of a function, the tensors to delete after it: nothing reads their memory later.

    Memory is freed with the last of its names. Names of tensors that are held anyway may stay.
    """
    memory, body = storage_owners_in(function), {*function.body}
    kept = set(map(memory, function.result_nodes))
    last: dict[fx.Node, fx.Node] = {}
    names: dict[fx.Node, list[fx.Node]] = {}
    for value in function.saved_in:
        names.setdefault(memory(value), []).append(value)
    for node in filter(is_statement, function.body):
        made = list(defined_by(node, body))
        for value in made:
            names.setdefault(memory(value), []).append(value)
        last |= dict.fromkeys(map(memory, (*filter(is_tensor, node.all_input_nodes), *made)), node)
    gone: dict[fx.Node, list[fx.Node]] = {}
    for owner, node in last.items():
        if owner in names and owner not in kept and owns_new_storage(owner):
            gone.setdefault(node, []).extend(names[owner])
    return gone


def temporary_bytes(node: fx.Node, read: Container[fx.Node], bytes_of: BytesOf) -> int:
    """The bytes of a statement's unnamed results: the items of its tuple that are not in ``read``.

    For losses also the temporaries of their kernels, for each element or for some rows at a time.
    """
    if node.target in LOSSES_WITH_TEMPORARIES and not node.meta["val"].dim():
        return bytes_of(node.all_input_nodes[0])
    if node.target is cross_entropy_gradient and node.kwargs.get("exact", True):
        num_classes, itemsize = int(node.meta["val"].shape[1]), int(node.meta["val"].itemsize)
        return min(bytes_of(node), rows_per_block(num_classes, itemsize) * num_classes * itemsize)
    if not num_items(node) or is_view(node):
        return 0
    return max(bytes_of(node) - sum(map(bytes_of, defined_by(node, read))), 0)


def storage_owners_in(function: PhaseFunction) -> Callable[[fx.Node], fx.Node]:
    """The owners of a value's memory, in a function that writes some values into others' memory."""
    written = in_place_operands(function)

    def memory(node: fx.Node) -> fx.Node:
        while (owner := storage_owner(node)) in written:
            node = written[owner]
        return owner

    return memory


def is_statement(node: fx.Node) -> bool:
    """Whether the node has a statement of its own. An item of a tuple has not: unpacking names it."""
    return node.target is not operator.getitem


def num_items(node: fx.Node) -> int:
    """How many items the node's value has, if it is a tuple."""
    value = node.meta.get("val")
    return len(value) if isinstance(value, list | tuple) else 0


def defined_by(node: fx.Node, read: Container[fx.Node]) -> Iterator[fx.Node]:
    """The tensors that a statement names: the node itself, or the items of its tuple that are in ``read``."""
    if is_tensor(node):
        yield node
    elif num_items(node):
        yield from (each for each in node.users if each.target is operator.getitem and each in read)
