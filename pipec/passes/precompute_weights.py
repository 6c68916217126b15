"""Move what depends only on parameters and fixed buffers out of the graph: computed once for each version.

::

    c = to_copy(w, bfloat16)                                      c = to_copy(w, bfloat16)      precomputed
    y = mm(x, c)                 FORWARD              ->
    dx = mm(dy, t(c))            BACKWARD                         y = mm(x, precomputed_0)         FORWARD
                                                                  dx = mm(dy, t(precomputed_0))    BACKWARD

Examples are the casts of mixed precision, weight norm and other parametrizations, and the angles of rotary
positions, which follow from a buffer and the length of the sequences. Otherwise every microbatch would
compute, save and send them. A value that is larger than its parameters stays in the graph; so does a large
one made of buffers alone.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from pipec.cost.symbolic_sizes import tensor_sizes
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
    leading_to,
)
from pipec.torch_compat import pytree

Sources = Mapping[fx.Node, frozenset[fx.Node]]
"""The parameters and buffers that each node depends on, for nodes that depend on nothing else."""

MAX_BUFFER_ELEMENTS = 2**22
"""The largest number of elements of a precomputed tensor that depends on buffers alone."""


@dataclass(frozen=True)
class PrecomputeWeights:
    """No bits change: each microbatch still makes the gradient of the parameter, in the parameter's dtype.

    ``include_buffers``: also precompute from buffers, of which every stage that reads one has a copy.
    """

    include_buffers: bool = True

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        sources, first = self._nodes_to_lift(graph)
        read = [node for node in sources if is_tensor(node) and not is_view(node) and _is_read(node, sources)]
        if not read:
            return graph
        for node in graph.nodes:
            if not is_forward(node):
                node.meta["operator"] = first.get(node.meta["operator"], node.meta["operator"])
        lifted, copies = _lifted_graph(graph, read)
        results = list(dict.fromkeys(copies[node] for node in read))
        lifted.output(tuple(results))
        with graph.module.graph.inserting_before(next(iter(graph.module.graph.nodes))):
            arguments = [
                graph.module.graph.placeholder(f"precomputed_{index}") for index in range(len(results))
            ]
        for node in read:
            index = results.index(copies[node])
            meta = {key: node.meta[key] for key in ("val", "cost", "phase")}
            role = Precomputed(index, _fqns(sources[node], Parameter), _fqns(sources[node], Buffer))
            arguments[index].meta.update(meta, role=role)
            node.replace_all_uses_with(arguments[index])
        for node in reversed([*sources]):
            if not node.users:
                graph.module.graph.erase_node(node)
        return replace(graph, precomputed=lifted)

    def _nodes_to_lift(self, graph: TrainingGraph) -> tuple[Sources, dict[int, int]]:
        """The nodes to lift with their sources, and the first operator that reads what each operator lifts.

        The backward of a lifted node moves to that reader's operator. Its own operator may have nothing else
        left, and be on a stage that does not hold the parameter. If an operator would keep some forward nodes
        and its first reader is a later operator, it keeps all its nodes.
        """
        whole: set[int] = set()
        while True:
            sources = self._sources(graph, whole)
            lifted = {node for node in sources if not (is_view(node) and _is_read(node, sources))}
            first = _first_readers(lifted, sources)
            rest = (node for node in graph.nodes if node not in lifted and not is_constant(node))
            remaining = {node.meta["operator"] for node in rest if is_forward(node)}
            divided = {op for op, reader in first.items() if op in remaining and reader > op}
            if not divided:
                return sources, first
            whole |= divided

    def _sources(self, graph: TrainingGraph, whole: Collection[int]) -> dict[fx.Node, frozenset[fx.Node]]:
        """In order, the nodes that depend only on parameters, fixed buffers and constants.

        Nodes of operators in ``whole`` are left out.
        """
        sources: dict[fx.Node, frozenset[fx.Node]] = {}
        fixed = set[fx.Node]()
        for node in graph.nodes:
            inputs = node.all_input_nodes
            if is_constant(node) and fixed.issuperset(inputs) and not _reads_other_sizes(node, graph):
                fixed.add(node)
            elif inputs and all(each in sources or each in fixed or self._is_source(each) for each in inputs):
                of_inputs = (sources.get(each, {each}) for each in inputs if each not in fixed)
                own = frozenset[fx.Node]().union(*of_inputs)
                if node.meta["operator"] not in whole and _may_be_lifted(node, own, graph):
                    sources[node] = own
        return sources

    def _is_source(self, node: fx.Node) -> bool:
        """Whether the node is a parameter, or a buffer that no forward changes."""
        if node.op != "placeholder":
            return False
        role = node.meta["role"]
        is_fixed = isinstance(role, Buffer) and not node.meta["updated"]
        return isinstance(role, Parameter) or (self.include_buffers and is_fixed)


def _fqns(sources: Iterable[fx.Node], role_type: type[Parameter] | type[Buffer]) -> tuple[str, ...]:
    roles = (node.meta["role"] for node in sources)
    return tuple(sorted(role.fqn for role in roles if isinstance(role, role_type)))


def _reads_other_sizes(node: fx.Node, graph: TrainingGraph) -> bool:
    """Whether the node's arguments include a size that may differ between microbatches, such as the rows."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    sizes = (sympy.sympify(each) for each in leaves if isinstance(each, sympy.Basic | torch.SymInt))
    return any(not size.free_symbols <= graph.variable_symbols.keys() for size in sizes)


def _may_be_lifted(node: fx.Node, sources: Collection[fx.Node], graph: TrainingGraph) -> bool:
    if not is_forward(node) or is_random(node) or is_collective(node) or _reads_other_sizes(node, graph):
        return False
    if any(user.op == "output" for user in node.users):
        return False
    parameters = [each for each in sources if isinstance(each.meta["role"], Parameter)]
    most = sum(_elements(each, graph) for each in parameters) if parameters else MAX_BUFFER_ELEMENTS
    return is_view(node) or _elements(node, graph) <= most


def _elements(node: fx.Node, graph: TrainingGraph) -> float:
    """The number of elements of a tensor or of several; infinite if microbatches differ in it."""
    symbols = graph.variable_symbols.items()
    planned = {symbol: sympy.sympify(graph.planned_sizes[name]) for symbol, name in symbols}
    counts = [each.elements.xreplace(planned) for each in tensor_sizes(node.meta["val"])]
    return sum(int(each) if each.is_number else math.inf for each in counts) if counts else math.inf


def _is_read(node: fx.Node, sources: Sources) -> bool:
    """Whether a node that stays in the graph reads this one, itself or through views."""
    return any(user not in sources or (is_view(user) and _is_read(user, sources)) for user in node.users)


def _first_readers(lifted: Collection[fx.Node], sources: Sources) -> dict[int, int]:
    """For each operator with lifted nodes, the first operator whose forward depends on them."""
    first: dict[int, int] = {}
    first_of: dict[fx.Node, list[int]] = {}
    for node in reversed([*sources]):
        users = [user for user in node.users if is_forward(user)]
        readers = [op for user in users for op in (first_of[user] if user in lifted else [_operator(user)])]
        first_of[node] = [min(readers)] if readers else []
        if readers and node in lifted:
            first[_operator(node)] = min(*readers, first.get(_operator(node), readers[0]))
    return first


def _operator(node: fx.Node) -> int:
    operator: int = node.meta["operator"]
    return operator


def _lifted_graph(graph: TrainingGraph, read: Sequence[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph that computes the nodes in ``read``, and its copy of each node that they depend on.

    Equal calls have one copy.
    """
    lifted, copies, by_call = fx.Graph(), dict[fx.Node, fx.Node](), dict[object, fx.Node]()
    needed = leading_to(read)
    for node in (each for each in graph.module.graph.nodes if each in needed):
        key = node if node.op == "placeholder" else _call_key(node, copies)
        if key not in by_call:
            by_call[key] = lifted.node_copy(node, copies.__getitem__)
        copies[node] = by_call[key]
    return lifted, copies


def _call_key(node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> object:
    args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    return node.target, repr(args), repr(sorted(kwargs.items()))
