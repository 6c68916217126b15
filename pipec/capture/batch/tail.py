"""Finds the tail: the part of a forward that mixes rows, and so must see the whole batch.

::

    z = linear(x, w)              PerRow              z = linear(x, w)              of each microbatch
    s = z @ z.T                   MixedRows           t = tail_input(z)
    loss = s.logsumexp(1).mean()  MixedRows    ->     s = t @ t.T                   once, of all rows
                                                      loss = s.logsumexp(1).mean()

Everything in front of the tail is computed row by row. The tail reads rows, and what microbatches sum over
theirs, of which it makes the batch's sum::

    m = z.mean(0)            SumOverRows          t = tail_input(m.expand(b, ...))     as a row for each row
    loss = m.square().sum()  MixedRows     ->     loss = t.mean(0).square().sum()

What is neither, nor the same for all microbatches, is computed in the tail.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipec.capture.batch.dependence import MEAN, Dependence, PerRow, SumOverRows, Whole
from pipec.capture.graph_calls import (
    INHERITED_META,
    describe_call,
    fake_value,
    is_random_call,
    mutates_argument,
)
from pipec.capture.markers import BATCH_COUNT, BATCH_FRACTION, IN_TAIL, TAIL_INPUT
from pipec.torch_compat.differentiation import unbacked_symbols

_ONCE_A_STEP = (BATCH_COUNT, BATCH_FRACTION)
"""Values that are arguments of the graph later."""


@dataclass(frozen=True)
class TailNodes:
    """The nodes that run once a step.

    They read ``inputs``, row by row along a dimension, ``sums`` over the rows, and copies of ``whole``, which
    are equal for all microbatches.
    """

    nodes: Set[fx.Node]
    inputs: Set[fx.Node]
    sums: Set[fx.Node]
    whole: Set[fx.Node]


def find_tail(
    graph: fx.Graph,
    mixing: Sequence[fx.Node],
    dependence_of: Callable[[fx.Node], Dependence],
    memory_of: Callable[[fx.Node], object],
) -> TailNodes | str:
    """The tail of a graph in which the nodes ``mixing`` need all rows; or the reason why there is none.

    ``memory_of`` identifies the memory of a node's value: views and their base share it.
    """
    nodes, inputs, sums, whole = (set[fx.Node]() for _ in range(4))
    pending, written = [*mixing], {memory_of(call.all_input_nodes[0]) for call in writes(graph)}
    while pending or (pending := _readers_of_written(graph, nodes, memory_of)):
        node = pending.pop()
        if node in nodes or node.op in ("placeholder", "get_attr", "output"):
            continue
        nodes.add(node)
        pending += [user for user in node.users if not _is_size(user)]
        for source in node.all_input_nodes:
            if source.target in _ONCE_A_STEP or _is_size(source):
                continue
            needed = _leading_to(source)
            if _is_row_by_row(source, dependence_of(source)) and not _chooses_at_random(source, needed):
                inputs.add(source)
            elif _is_summed(source, dependence_of(source)) and memory_of(source) not in written:
                sums.add(source)
            elif all(isinstance(dependence_of(each), Whole) or _is_size(each) for each in needed):
                whole.update(each for each in needed if each.op not in ("placeholder", "get_attr"))
            else:
                pending.append(source)
    found = TailNodes(nodes, inputs - nodes, sums - nodes, whole - nodes)
    return _reason_against(graph, found, memory_of) or found


def insert_tail_inputs(
    graph: fx.Graph, tail: TailNodes, rows: fx.Node, dependence_of: Callable[[fx.Node], Dependence]
) -> None:
    """Let the tail read ``TAIL_INPUT`` nodes, and copies of what is equal for all microbatches.

    ``rows`` is an argument that has the rows of a microbatch.
    """
    copies: dict[fx.Node, fx.Node] = {}
    for node in [each for each in graph.nodes if each in tail.whole]:
        with graph.inserting_after(node):
            copies[node] = graph.node_copy(node, lambda read: copies.get(read, read))
    for node in [each for each in graph.nodes if each in tail.nodes]:
        for source in node.all_input_nodes:
            dependence = dependence_of(source)
            if source in tail.inputs and source not in copies:
                assert isinstance(dependence, PerRow)
                copies[source] = _joined(source, node, dependence.dim)
            if source in tail.sums and source not in copies:
                assert isinstance(dependence, SumOverRows)
                copies[source] = _summed(source, node, rows, is_mean=dependence == MEAN)
            if source in copies:
                node.replace_input_with(source, copies[source])
    for node in (*tail.nodes, *(copies[each] for each in tail.whole)):
        node.meta["custom"] = {**node.meta.get("custom", {}), IN_TAIL: True}


def _joined(source: fx.Node, reader: fx.Node, dim: int) -> fx.Node:
    """All rows of ``source``, which has them in dimension ``dim``, for the ``reader`` and those behind it."""
    if not dim:
        return _call(reader, reader, TAIL_INPUT, source)
    in_front = _call(reader, reader, torch.movedim, source, dim, 0)
    back = _call(reader, reader, torch.movedim, _call(reader, reader, TAIL_INPUT, in_front), 0, dim)
    return _call(reader, reader, Tensor.contiguous, back)


def _summed(source: fx.Node, reader: fx.Node, rows: fx.Node, *, is_mean: bool) -> fx.Node:
    """The sum or mean of ``source`` over all microbatches, for the ``reader`` and those behind it.

    A microbatch puts its sum into a first row, before zeros, and its mean into each of as many rows as
    ``rows`` has. So the tail's sum or mean over all rows is the batch's.
    """
    num_dims = fake_value(source).ndim
    size = _call(reader, source, torch.ops.aten.sym_size.int, rows, 0)
    row = _call(reader, source, torch.unsqueeze, source, 0)
    if is_mean:
        parts = _call(reader, source, Tensor.expand, row, size, *[-1] * num_dims)
    else:
        with fake_value(source).fake_mode:
            numbers = _call(reader, source, torch.arange, size, device=fake_value(source).device)
        is_first = _call(reader, source, torch.eq, numbers, 0)
        is_first = _call(reader, source, torch.reshape, is_first, (-1, *[1] * num_dims))
        parts = _call(
            reader, source, torch.where, is_first, row, _call(reader, source, torch.zeros_like, row)
        )
    return _call(
        reader, reader, torch.mean if is_mean else torch.sum, _call(reader, reader, TAIL_INPUT, parts), 0
    )


def _call(reader: fx.Node, like: fx.Node, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A call before ``reader`` that belongs to the operator of ``like``."""
    with reader.graph.inserting_before(reader):
        made = reader.graph.call_function(function, args, kwargs)
    made.meta = {key: like.meta[key] for key in INHERITED_META if key in like.meta}
    values = fx.map_arg(args, fake_value)
    made.meta["example_value"] = values[0] if function is TAIL_INPUT else function(*values, **kwargs)
    return made


def _is_summed(node: fx.Node, dependence: Dependence) -> bool:
    """Whether the batch's value is the sum or mean of what microbatches have."""
    value = fake_value(node)
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return is_float and dependence in (SumOverRows(), MEAN)


def _is_row_by_row(node: fx.Node, dependence: Dependence) -> bool:
    """Whether the values of microbatches, one behind the other, are the batch's."""
    if not isinstance(dependence, PerRow) or not isinstance(fake_value(node), Tensor):
        return False
    return dependence == PerRow(dependence.dim, inner=dependence.inner)


def _chooses_at_random(node: fx.Node, needed: Sequence[fx.Node]) -> bool:
    """Whether a node may be drawn numbers of rows: the tail draws among all rows."""
    return not fake_value(node).is_floating_point() and any(map(is_random_call, needed))


def _readers_of_written(
    graph: fx.Graph, tail: Set[fx.Node], memory_of: Callable[[fx.Node], object]
) -> list[fx.Node]:
    """The nodes that read the memory that the tail writes: what it changes belongs to it alone."""
    written = {memory_of(call.all_input_nodes[0]) for call in writes(graph) if call in tail}
    return [
        node
        for node in graph.nodes
        if node not in tail
        and node.op != "output"
        and not written.isdisjoint(map(memory_of, node.all_input_nodes))
    ]


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a number that follows from the sizes of arguments: the tail computes its own."""
    value = fake_value(node)
    if value is None or isinstance(value, Tensor | list | tuple | nn.Module):
        return False
    return not unbacked_symbols(value)


def _leading_to(node: fx.Node) -> list[fx.Node]:
    """A node and all that it depends on, without what follows from sizes or is computed once a step."""
    found, pending = dict[fx.Node, None](), [node]
    while pending:
        each = pending.pop()
        if each not in found and not _is_size(each) and each.target not in _ONCE_A_STEP:
            found[each] = None
            pending += each.all_input_nodes
    return [*found]


def _reason_against(graph: fx.Graph, tail: TailNodes, memory_of: Callable[[fx.Node], object]) -> str:
    """Why the tail cannot run once, of all rows; empty if it can."""
    if not (tail.inputs or tail.sums):
        return "it reads no rows, by whose number its results would be made"
    for node in tail.nodes | tail.whole:
        for source in node.all_input_nodes:
            if _is_trained_matrix(source):
                return f"{describe_call(node)} comes behind it, and has trained weights of several dimensions"
    places = {node: place for place, node in enumerate(graph.nodes)}
    written = writes(graph)
    for value in (*tail.inputs, *tail.sums, *tail.whole):
        read_at = min(places[user] for user in value.users if user in tail.nodes or user in tail.whole)
        late = [
            x for x in written if places[x] >= read_at and memory_of(x.all_input_nodes[0]) == memory_of(value)
        ]
        if late:
            return f"{describe_call(late[0])} writes into a value that is read row by row"
    return ""


def writes(graph: fx.Graph) -> list[fx.Node]:
    """The calls that write into their first input."""
    return [node for node in graph.nodes if mutates_argument(node) and node.all_input_nodes]


def _is_trained_matrix(node: fx.Node) -> bool:
    """Dynamo's graphs read parameters as such; those of export have plain tensors as attributes."""
    value = fake_value(node)
    is_parameter = isinstance(value, nn.Parameter) if node.op == "placeholder" else node.op == "get_attr"
    return is_parameter and isinstance(value, Tensor) and value.requires_grad and value.ndim > 1
