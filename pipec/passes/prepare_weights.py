"""Take what depends on parameters alone out of the graph, to be computed once for each version of them.

::

    c = to_copy(w, bfloat16)                                      c = to_copy(w, bfloat16)      prepared
    y = mm(x, c)                 FORWARD              ->
    dx = mm(dy, t(c))            BACKWARD                         y = mm(x, prepared_0)         FORWARD
                                                                  dx = mm(dy, t(prepared_0))    BACKWARD

Such are the casts of mixed precision, weight norm and other parametrizations. Microbatches would compute them
again, and save them besides. What is larger than its parameters stays where it is.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from pipec.graph import (
    Parameter,
    Prepared,
    TrainingGraph,
    is_collective,
    is_forward,
    is_random,
    is_tensor,
    is_view,
)

Depends = Mapping[fx.Node, frozenset[fx.Node]]
"""The parameters of which nodes are made, for nodes that are made of nothing else."""


@dataclass(frozen=True)
class PrepareWeights:
    """Bits stay as they are. The gradient still comes of each microbatch, and so in the parameter's type."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        depends, first = _to_lift(graph)
        read = [node for node in depends if is_tensor(node) and not is_view(node) and _is_read(node, depends)]
        if not read:
            return graph
        for node in graph.nodes:
            if not is_forward(node):
                node.meta["operator"] = first.get(node.meta["operator"], node.meta["operator"])
        lifted, copies = _lifted(graph, read)
        made = list(dict.fromkeys(copies[node] for node in read))
        lifted.output(tuple(made))
        with graph.module.graph.inserting_before(next(iter(graph.module.graph.nodes))):
            arguments = [graph.module.graph.placeholder(f"prepared_{index}") for index in range(len(made))]
        for node in read:
            index = made.index(copies[node])
            fqns = tuple(sorted(each.meta["role"].fqn for each in depends[node]))
            known = {key: node.meta[key] for key in ("val", "cost", "phase")}
            arguments[index].meta.update(known, role=Prepared(index, fqns))
            node.replace_all_uses_with(arguments[index])
        for node in reversed([*depends]):
            if not node.users:
                graph.module.graph.erase_node(node)
        return replace(graph, prepared=lifted)


def _to_lift(graph: TrainingGraph) -> tuple[Depends, dict[int, int]]:
    """The nodes that depend on parameters alone, and the first operator that reads what each operator lifts.

    The backward of what is lifted goes with that reader: its own operator may be left without anything else,
    and on a stage that does not hold the parameter. An operator that keeps a part that is not such a reader
    keeps everything.
    """
    whole: set[int] = set()
    while True:
        depends = _of_parameters_alone(graph, whole)
        lifted = {node for node in depends if not (is_view(node) and _is_read(node, depends))}
        first = _first_readers(lifted, depends)
        left = {node.meta["operator"] for node in graph.nodes if is_forward(node) and node not in lifted}
        torn = {operator for operator, reader in first.items() if operator in left and reader > operator}
        if not torn:
            return depends, first
        whole |= torn


def _of_parameters_alone(graph: TrainingGraph, whole: Collection[int]) -> dict[fx.Node, frozenset[fx.Node]]:
    """In order, the nodes that depend on nothing but parameters. Operators that stay ``whole`` have none."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if sources and all(source in found or _is_parameter(source) for source in sources):
            parameters = frozenset[fx.Node]().union(*(found.get(each, {each}) for each in sources))
            if node.meta["operator"] not in whole and _may_be_lifted(node, parameters):
                found[node] = parameters
    return found


def _is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta["role"], Parameter)


def _may_be_lifted(node: fx.Node, parameters: frozenset[fx.Node]) -> bool:
    if not is_forward(node) or is_random(node) or is_collective(node):
        return False
    if any(user.op == "output" for user in node.users):
        return False
    return is_view(node) or _elements(node.meta["val"]) <= sum(_elements(p.meta["val"]) for p in parameters)


def _elements(value: Any) -> float:
    """How many numbers a tensor or a tuple of tensors has; infinite if that changes with the microbatch."""
    if isinstance(value, tuple | list):
        return sum(map(_elements, value))
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return float("inf")
    return value.numel()


def _is_read(node: fx.Node, depends: Depends) -> bool:
    """Whether something that stays reads the node: a view of it does, if something that stays reads that."""
    return any(user not in depends or (is_view(user) and _is_read(user, depends)) for user in node.users)


def _first_readers(lifted: Collection[fx.Node], depends: Depends) -> dict[int, int]:
    """By operator that something is lifted of, the first operator whose forward reads what comes of it."""
    first: dict[int, int] = {}
    readers: dict[fx.Node, list[int]] = {}
    for node in reversed([*depends]):
        users = [user for user in node.users if is_forward(user)]
        found = [
            number for user in users for number in (readers[user] if user in lifted else [_operator(user)])
        ]
        readers[node] = [min(found)] if found else []
        if found and node in lifted:
            first[_operator(node)] = min(*found, first.get(_operator(node), found[0]))
    return first


def _operator(node: fx.Node) -> int:
    operator: int = node.meta["operator"]
    return operator


def _lifted(graph: TrainingGraph, read: Sequence[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The graph that computes what is ``read``, and its node for each that it stands for.

    What is the same call of the same values is made once.
    """
    lifted, copies, known = fx.Graph(), dict[fx.Node, fx.Node](), dict[object, fx.Node]()
    for node in _leading_to(graph, read):
        key = node if node.op == "placeholder" else _call(node, copies)
        if key not in known:
            known[key] = lifted.node_copy(node, copies.__getitem__)
        copies[node] = known[key]
    return lifted, copies


def _call(node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> object:
    args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    return node.target, repr(args), repr(sorted(kwargs.items()))


def _leading_to(graph: TrainingGraph, read: Sequence[fx.Node]) -> Iterator[fx.Node]:
    needed, pending = set[fx.Node](), [*read]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return (node for node in graph.module.graph.nodes if node in needed)
