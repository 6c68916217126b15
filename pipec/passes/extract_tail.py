"""Move the tail, which runs once a step of all rows, out of the graph.

::

    z = mm(x, w)             FORWARD                    z = mm(x, w)             FORWARD
    t = tail_input(z)        FORWARD                    return z                 TailInput(0)
    s = mm(t, t(t))          FORWARD
    loss = mean(s)           FORWARD            ->      t = tail_input_0         the tail
    ds = expand(1 / b)       BACKWARD                   s, loss, ds, dt = ...
    dt = mm(ds, t)           BACKWARD                   return loss, dt          Output(0), TailGradient(0)
    dz = tail_gradient(dt)   BACKWARD
    dw = mm(t(x), dz)        BACKWARD                   dz = tail_gradient_0     BACKWARD
                                                        dw = mm(t(x), dz)        BACKWARD

What remains is of a microbatch. What the tail reads besides its inputs follows from parameters, buffers and
sizes, and is computed in the tail. A parameter that both read has two gradients, which are added up.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from pipec.capture.markers import IN_TAIL, TAIL_GRADIENT, TAIL_INPUT
from pipec.errors import CaptureError
from pipec.graph import (
    Gradient,
    ModelInput,
    ResultRole,
    TailGradient,
    TailInput,
    TrainingGraph,
    is_forward,
    is_gradient_sum,
)
from pipec.ir import Phase

_aten = torch.ops.aten


@dataclass(frozen=True)
class ExtractTail:
    """Nodes stay in order. All inputs of the tail belong to its last operator, and so to one stage."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        inputs = [node for node in graph.nodes if node.target is TAIL_INPUT]
        if not inputs:
            return graph
        gradients = [node for node in graph.nodes if node.target is TAIL_GRADIENT]
        behind = _depending_on(graph, gradients)
        own = [node for node in graph.nodes if IN_TAIL in (node.meta.get("custom") or {})]
        tail = {*own, *_depending_on(graph, [*inputs, *own])}.difference(behind, gradients, inputs)
        results = dict(_separate_gradients(graph, tail, behind))
        results |= {role: node for role, node in graph.outputs if node in tail and role not in results}
        results |= {TailGradient(k): node.all_input_nodes[0] for k, node in enumerate(gradients)}
        extracted = _copy_of_tail(graph, tail, inputs, results.values())
        kept = [(role, node) for role, node in graph.outputs if node not in tail]
        last = max(node.meta["operator"] for node in tail if is_forward(node))
        for node in inputs:
            node.target, node.meta["operator"] = _aten.alias.default, last
            node.meta["val"] = node.all_input_nodes[0].meta["val"]
        _read_gradients(graph, gradients, last)
        kept += [(TailInput(k), node) for k, node in enumerate(inputs)]
        graph.module.graph.output_node().args = (tuple(node for _, node in kept),)
        for node in reversed([*graph.module.graph.nodes]):
            if node in tail or (not node.users and node.op == "call_function" and not node.is_impure()):
                graph.module.graph.erase_node(node)
        roles = tuple(role for role, _ in kept)
        return replace(graph, results=roles, tail=extracted, tail_results=tuple(results))


def _depending_on(graph: TrainingGraph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that read one of ``sources``, directly or through others."""
    found: set[fx.Node] = set()
    reached = {*sources}
    for node in graph.nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            found.add(node)
    return found


def _separate_gradients(
    graph: TrainingGraph, tail: set[fx.Node], behind: set[fx.Node]
) -> Iterator[tuple[ResultRole, fx.Node]]:
    """Take the tail's terms out of the gradients of parameters; yields their sums, which join the tail.

    Raises:
        CaptureError: another value depends on the tail other than through gradients of its inputs.
    """
    for role, node in graph.outputs:
        terms = _terms(node, tail) if isinstance(role, Gradient) and node in behind else []
        own = [term for term in terms if term in tail]
        if own:
            node.replace_all_uses_with(_sums([term for term in terms if term not in tail], node)[-1])
            sums = _sums(own, node)
            tail.update(sums)
            yield role, sums[-1]
            _erase_sum(node)
    for node in graph.nodes:
        if node in behind and not tail.isdisjoint(node.all_input_nodes):
            raise CaptureError(
                f"{node.name} needs gradients of all rows and those of a microbatch, which cannot be told "
                'apart; pass microbatches=1, or microbatch_weight="rows" for the mean over microbatches'
            )


def _terms(node: fx.Node, tail: set[fx.Node]) -> list[fx.Node]:
    """The terms of a sum of gradients: the tail's, and those of microbatches."""
    if node in tail or not is_gradient_sum(node):
        return [node]
    return [term for source in node.all_input_nodes for term in _terms(source, tail)]


def _sums(terms: Sequence[fx.Node], like: fx.Node) -> list[fx.Node]:
    """The sums of the first terms, of the first one alone to all of them, inserted before ``like``."""
    sums = [terms[0]]
    for term in terms[1:]:
        with like.graph.inserting_before(like):
            sums.append(like.graph.call_function(_aten.add.Tensor, (sums[-1], term)))
        sums[-1].meta = dict(like.meta)
    return sums


def _erase_sum(node: fx.Node) -> None:
    """Erase a sum that nothing reads, and the sums that only it reads."""
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        if is_gradient_sum(source) and not source.users:
            _erase_sum(source)


def _copy_of_tail(
    graph: TrainingGraph, tail: set[fx.Node], inputs: Sequence[fx.Node], results: Iterable[fx.Node]
) -> fx.Graph:
    """A graph of the tail. Its arguments have the roles that they have in ``graph``, or are ``TailInput``.

    Raises:
        CaptureError: the tail reads a value of a microbatch other than its inputs.
    """
    extracted, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed, pending = set[fx.Node](), [*results]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += [] if node in inputs else node.all_input_nodes
    for node in (each for each in graph.module.graph.nodes if each in needed):
        if node in inputs:
            copies[node] = extracted.placeholder(f"tail_input_{inputs.index(node)}")
            copies[node].meta = {**node.meta, "role": TailInput(inputs.index(node))}
            continue
        role = node.meta.get("role")
        if isinstance(role, ModelInput) and role.batched:
            raise CaptureError(
                f"the loss reads {role.path} both row by row and of all rows, which cannot be told apart; "
                'pass microbatches=1, or microbatch_weight="rows" for the mean over microbatches'
            )
        copies[node] = extracted.node_copy(node, copies.__getitem__)
        copies[node].meta["phase"] = Phase.TAIL
    extracted.output(tuple(copies[node] for node in results))
    return extracted


def _read_gradients(graph: TrainingGraph, gradients: Sequence[fx.Node], operator: int) -> None:
    """Let ``TAIL_GRADIENT`` nodes read arguments of the graph."""
    nodes = graph.module.graph
    for number, node in enumerate(gradients):
        with nodes.inserting_before(next(iter(nodes.nodes))):
            argument = nodes.placeholder(f"tail_gradient_{number}")
        argument.meta = {**node.meta, "role": TailGradient(number)}
        node.target, node.args, node.meta["operator"] = _aten.alias.default, (argument,), operator
