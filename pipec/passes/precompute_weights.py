"""Take what depends on held tensors alone out of the graph, to be computed once for each version of them.

::

    c = to_copy(w, bfloat16)                                      c = to_copy(w, bfloat16)      precomputed
    y = mm(x, c)                 FORWARD              ->
    dx = mm(dy, t(c))            BACKWARD                         y = mm(x, precomputed_0)         FORWARD
                                                                  dx = mm(dy, t(precomputed_0))    BACKWARD

Such are the casts of mixed precision, weight norm and other parametrizations, and the angles of rotary
positions, which follow from a buffer. Microbatches would compute them again, and save and send them besides.
What is larger than its parameters stays where it is, as does what is large and made of buffers.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from pipec import torch_compat
from pipec.graph import (
    Buffer,
    Parameter,
    Precomputed,
    TrainingGraph,
    is_collective,
    is_constant,
    is_forward,
    is_random,
    is_tensor,
    is_view,
)

Depends = Mapping[fx.Node, frozenset[fx.Node]]
"""The parameters and buffers of which nodes are made, for nodes that are made of nothing else."""

MAX_BUFFER_ELEMENTS = 2**22
"""How many numbers a tensor that is made of buffers alone may have."""


@dataclass(frozen=True)
class PrecomputeWeights:
    """Bits stay as they are. The gradient still comes of each microbatch, and so in the parameter's type.

    ``include_buffers``: every stage may hold a buffer that it reads, and compute what follows from it.
    """

    include_buffers: bool = True

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        depends, first = self._to_lift(graph)
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
            arguments = [graph.module.graph.placeholder(f"precomputed_{index}") for index in range(len(made))]
        for node in read:
            index = made.index(copies[node])
            made_of = {kind: _fqns(depends[node], kind) for kind in (Parameter, Buffer)}
            known = {key: node.meta[key] for key in ("val", "cost", "phase")}
            role = Precomputed(index, made_of[Parameter], made_of[Buffer])
            arguments[index].meta.update(known, role=role)
            node.replace_all_uses_with(arguments[index])
        for node in reversed([*depends]):
            if not node.users:
                graph.module.graph.erase_node(node)
        return replace(graph, precomputed=lifted)

    def _to_lift(self, graph: TrainingGraph) -> tuple[Depends, dict[int, int]]:
        """The nodes that depend on held tensors alone, and by operator the first that reads what it lifts.

        The backward of what is lifted goes with that reader: its own operator may be left without anything
        else, and on a stage that does not hold the parameter. An operator that keeps a part that is not such
        a reader keeps everything.
        """
        whole: set[int] = set()
        while True:
            depends = self._of_held_alone(graph, whole)
            lifted = {node for node in depends if not (is_view(node) and _is_read(node, depends))}
            first = _first_readers(lifted, depends)
            kept = (node for node in graph.nodes if node not in lifted and not is_constant(node))
            left = {node.meta["operator"] for node in kept if is_forward(node)}
            torn = {operator for operator, reader in first.items() if operator in left and reader > operator}
            if not torn:
                return depends, first
            whole |= torn

    def _of_held_alone(
        self, graph: TrainingGraph, whole: Collection[int]
    ) -> dict[fx.Node, frozenset[fx.Node]]:
        """In order, what depends on nothing but parameters, buffers that never change, and constants.

        Operators that stay ``whole`` have none.
        """
        found: dict[fx.Node, frozenset[fx.Node]] = {}
        fixed = set[fx.Node]()
        for node in graph.nodes:
            sources = node.all_input_nodes
            if is_constant(node) and not _reads_sizes(node) and fixed.issuperset(sources):
                fixed.add(node)
            elif sources and all(each in found or each in fixed or self._is_held(each) for each in sources):
                made_of = (found.get(each, {each}) for each in sources if each not in fixed)
                held = frozenset[fx.Node]().union(*made_of)
                if node.meta["operator"] not in whole and _may_be_lifted(node, held):
                    found[node] = held
        return found

    def _is_held(self, node: fx.Node) -> bool:
        """Whether the node is a parameter, or a buffer that no forward changes."""
        if node.op != "placeholder":
            return False
        role = node.meta["role"]
        is_fixed = isinstance(role, Buffer) and not node.meta["updated"]
        return isinstance(role, Parameter) or (self.include_buffers and is_fixed)


def _fqns(held: Iterable[fx.Node], kind: type[Parameter] | type[Buffer]) -> tuple[str, ...]:
    roles = (node.meta["role"] for node in held)
    return tuple(sorted(role.fqn for role in roles if isinstance(role, kind)))


def _reads_sizes(node: fx.Node) -> bool:
    """Whether the node's arguments name a size that changes from call to call."""
    leaves = torch_compat.pytree.tree_leaves((node.args, node.kwargs))
    return any(isinstance(each, sympy.Basic | torch.SymInt) for each in leaves)


def _may_be_lifted(node: fx.Node, held: Collection[fx.Node]) -> bool:
    if not is_forward(node) or is_random(node) or is_collective(node) or _reads_sizes(node):
        return False
    if any(user.op == "output" for user in node.users):
        return False
    parameters = [each for each in held if isinstance(each.meta["role"], Parameter)]
    most = sum(_elements(each.meta["val"]) for each in parameters) if parameters else MAX_BUFFER_ELEMENTS
    return is_view(node) or _elements(node.meta["val"]) <= most


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
