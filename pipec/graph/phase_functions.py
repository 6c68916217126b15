"""The functions of a stage, read off the graph: the arguments, body, saved values and results of each.

Every edge of the graph has one meaning:

========================================  =============================================
an edge to the same function              is a local variable
an edge to another function of the stage  is a saved value
an edge to another stage                  is a message
========================================  =============================================

Parameters, buffers that never change and constants are arguments of every function and are never saved.
Views are not saved either: the tensor that owns the memory is saved, and each function that reads a view
makes it again. Recomputed values are made again in a function of their own, or where a backward first reads
them.

A phase is one function, or several that run one after the other: its segments. Passes put nodes into segments
with ``meta["segment"]`` where something has to happen between two of them. The phase that makes gradients is
also divided where some gradients have to be complete before others.
"""

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from pipec.graph import (
    BatchCount,
    Buffer,
    Gradient,
    InputRole,
    Output,
    Parameter,
    Precomputed,
    ResultRole,
    TailGradient,
    TailInput,
    TrainingGraph,
    UpdatedBuffer,
    is_check,
    is_collective,
    is_constant,
    is_view,
    leading_to,
    recv,
    send,
    stage_of,
)
from pipec.graph.lifetimes import Lifetimes
from pipec.graph.phase_segments import split_into_segments
from pipec.ir import GRADIENT_PHASES, Phase, function_names

_BACKWARDS = (Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class PhaseFunction:
    """One phase of one stage, or segment number ``segment`` of ``num_segments`` of it.

    ``body`` has the nodes to compute, in order. ``received``, ``inputs`` and ``saved_in`` are arguments.
    ``outputs``, ``saved_out``, ``buffer_updates``, ``gradients`` and the values of ``sent`` (send nodes) are
    results, and so are the inputs of ``collectives``, which replicas run before the next segment. The
    ``tail_values`` are inputs of the tail, or gradients that it returns.
    """

    stage: int
    phase: Phase
    body: tuple[fx.Node, ...]
    received: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    saved_in: tuple[fx.Node, ...]
    saved_out: tuple[fx.Node, ...]
    sent: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...] = ()
    buffer_updates: tuple[tuple[str, fx.Node], ...] = ()
    gradients: tuple[tuple[str, fx.Node], ...] = ()
    segment: int = 0
    num_segments: int = 1
    collectives: tuple[fx.Node, ...] = ()
    tail_values: tuple[tuple[TailInput | TailGradient, fx.Node], ...] = ()

    @functools.cached_property
    def lifetimes(self) -> Lifetimes:
        """When values are allocated and freed, and which are written in place."""
        return Lifetimes.of(self.body, self.saved_in, self.saved_out, self.result_nodes)

    @property
    def name(self) -> str:
        return function_names(self.phase, self.num_segments)[self.segment]

    @property
    def is_last(self) -> bool:
        """Whether no other segment of the phase follows."""
        return self.segment == self.num_segments - 1

    @property
    def takes_saved(self) -> bool:
        """Whether a function before it saves something for it."""
        begins = self.phase is Phase.FORWARD and self.segment == 0
        return not begins and self.phase is not Phase.TAIL

    @property
    def read_nodes(self) -> Iterator[fx.Node]:
        """The nodes that the body and the results read, once for each reader."""
        for node in self.body:
            yield from node.all_input_nodes
        yield from self.result_nodes

    @property
    def reads_precomputed(self) -> bool:
        """Whether it reads what is computed once of the weights."""
        return any(isinstance(node.meta.get("role"), Precomputed) for node in self.read_nodes)

    @property
    def result_nodes(self) -> tuple[fx.Node, ...]:
        """The nodes whose values leave the function."""
        sent = tuple(node.all_input_nodes[0] for node in self.sent + self.collectives)
        named = tuple(node for _, node in (*self.buffer_updates, *self.gradients, *self.tail_values))
        return sent + self.outputs + self.saved_out + named


@dataclass(frozen=True)
class StageFunctions:
    """The functions of a stage in the order in which they run, and its tensors in the order of first use."""

    index: int
    functions: tuple[PhaseFunction, ...]
    parameters: tuple[fx.Node, ...]
    buffers: tuple[fx.Node, ...]
    precomputed: tuple[fx.Node, ...]
    """Arguments of the graph that some function reads: values that depend on weights and fixed buffers."""
    batch_counts: tuple[fx.Node, ...]
    """Arguments of the graph that some function reads: values of the whole mini-batch."""
    tail: PhaseFunction | None
    """The function that runs once a step, if the stage has one. Its nodes are of a graph of their own."""
    constants: tuple[fx.Node, ...]
    """The constant nodes that functions read, and the nodes that compute these, in order. The generated
    ``constants(b)`` returns the former."""

    @property
    def all_functions(self) -> tuple[PhaseFunction, ...]:
        """The functions of the phases, and the tail."""
        return self.functions if self.tail is None else (*self.functions, self.tail)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of the stage, in the order in which they run."""
        return tuple(dict.fromkeys(function.phase for function in self.functions))

    def phase_functions(self, phase: Phase) -> tuple[PhaseFunction, ...]:
        """The functions of a phase, in the order in which they run."""
        return tuple(function for function in self.functions if function.phase is phase)


def stage_functions(
    graph: TrainingGraph,
    stage: int,
    split_backward: bool,
    gradients: Sequence[Collection[str]] = (),
) -> StageFunctions:
    """The functions of one stage of the graph. With ``split_backward`` the backward is in two halves.

    ``gradients`` are groups of parameters. The gradients of a group are complete at the end of a segment of
    the backward, or of its weight half, and no later than the gradients of the next group.

    The functions are built from the last to the first, because each must save what the next one needs.
    """
    nodes = [n for n in graph.nodes if not is_constant(n) and stage_of(n) == stage]
    phases = _phases(graph, nodes, split_backward)
    functions: list[PhaseFunction] = []
    needed: tuple[fx.Node, ...] = ()
    segments_of = {phase: _segments(graph, nodes, phase, gradients) for phase in phases}
    backwards = [segment for phase in phases if phase in _BACKWARDS for segment in segments_of[phase]]
    _add_recomputed(nodes, backwards)
    for phase in reversed(phases):
        segments = segments_of[phase]
        for number in reversed(range(len(segments))):
            function = _function(graph, stage, phase, segments, number, needed)
            functions.insert(0, function)
            needed = function.saved_in
    assert not needed, f"stage {stage} reads saved values {needed} that no function computes"
    tail = _tail(graph, stage) if any(function.tail_values for function in functions) else None
    held = _tensors(graph, functions, tail)
    return StageFunctions(
        stage,
        tuple(functions),
        parameters=held[Parameter],
        buffers=held[Buffer],
        precomputed=held[Precomputed],
        batch_counts=held[BatchCount],
        tail=tail,
        constants=_constants(graph, functions),
    )


def _phases(graph: TrainingGraph, nodes: Sequence[fx.Node], split_backward: bool) -> list[Phase]:
    phases = [Phase.FORWARD]
    if not graph.mode.trains:
        return phases
    if any(node.meta.get("recompute") is Phase.RECOMPUTE for node in nodes):
        phases.append(Phase.RECOMPUTE)
    return phases + ([Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT] if split_backward else [Phase.BACKWARD])


def belongs_to_phase(node: fx.Node, phase: Phase) -> bool:
    """Whether the node belongs to the phase. Other phases may make a view again."""
    own = node.meta["phase"]
    match phase:
        case Phase.RECOMPUTE:
            return own is Phase.FORWARD and node.meta.get("recompute") is Phase.RECOMPUTE
        case Phase.BACKWARD:
            return own in _BACKWARDS
        case _:
            return own is phase


def _segments(
    graph: TrainingGraph, nodes: Sequence[fx.Node], phase: Phase, gradients: Sequence[Collection[str]]
) -> list[set[fx.Node]]:
    own = [node for node in nodes if belongs_to_phase(node, phase)]
    if phase is Phase.RECOMPUTE:
        return [set(own)]
    return split_into_segments(graph, own, gradients if phase in GRADIENT_PHASES else ())


def _add_recomputed(nodes: Iterable[fx.Node], segments: Sequence[set[fx.Node]]) -> None:
    """Add each recomputed node to the first segment that reads it, with all items of a tuple."""
    waiting = {node for node in nodes if node.meta.get("recompute") is Phase.BACKWARD}
    seen: set[fx.Node] = set()
    for segment in segments:
        pending = [source for node in segment for source in node.all_input_nodes]
        while pending:
            node = pending.pop()
            if node in waiting or (node not in seen and is_view(node)):
                again = waiting & {node, *(user for user in node.users if user.target is operator.getitem)}
                segment |= again
                waiting -= again
                seen.add(node)
                pending.extend(node.all_input_nodes)


def _function(
    graph: TrainingGraph,
    stage: int,
    phase: Phase,
    segments: Sequence[set[fx.Node]],
    segment: int,
    saved_out: tuple[fx.Node, ...],
) -> PhaseFunction:
    local, others = segments[segment], set[fx.Node]().union(*segments[:segment], *segments[segment + 1 :])
    is_last = segment == len(segments) - 1
    results = [] if phase is Phase.RECOMPUTE else _results(graph, stage, phase)
    results = [(r, n) for r, n in results if n in local or (is_last and n not in others)]
    sent = [] if phase is Phase.RECOMPUTE else [n for n in local if n.target is send]
    collectives = [] if is_last else list(filter(is_collective, segments[segment + 1]))
    checks = [node for node in local if is_check(node) and phase is not Phase.RECOMPUTE]
    roots = [*saved_out, *checks, *(n for _, n in results)]
    roots += [n.all_input_nodes[0] for n in [*sent, *collectives]]
    body, outside = _closure(roots, local, reads_changed=phase is Phase.FORWARD and segment == 0)
    ordered = _sorter(graph)
    received = {node for node in body if _is_received(node)}
    return PhaseFunction(
        stage,
        phase,
        body=tuple(
            _recompute_before_use(
                ordered(body - received), {node for node in local if belongs_to_phase(node, phase)}
            )
        ),
        received=ordered(received),
        inputs=ordered(n for n in outside if _is_input(n)),
        saved_in=ordered(n for n in outside if not _is_input(n)),
        saved_out=saved_out,
        sent=ordered(sent),
        outputs=tuple(n for r, n in results if isinstance(r, Output)),
        tail_values=tuple((r, n) for r, n in results if isinstance(r, TailInput)),
        buffer_updates=tuple((r.fqn, n) for r, n in results if isinstance(r, UpdatedBuffer)),
        gradients=tuple((r.fqn, n) for r, n in results if isinstance(r, Gradient)),
        segment=segment,
        num_segments=len(segments),
        collectives=ordered(collectives),
    )


def _sorter(graph: TrainingGraph) -> Callable[[Iterable[fx.Node]], tuple[fx.Node, ...]]:
    """Sorts nodes as they are in the graph."""
    order = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    return lambda nodes: tuple(sorted(nodes, key=order.__getitem__))


def _tail(graph: TrainingGraph, stage: int) -> PhaseFunction:
    """The function that runs once a step, of all rows."""
    assert graph.tail is not None
    return PhaseFunction(
        stage,
        Phase.TAIL,
        body=tuple(node for node in graph.tail.nodes if node.op == "call_function"),
        received=(),
        inputs=tuple(node for node in graph.tail.find_nodes(op="placeholder") if _is_input(node)),
        saved_in=(),
        saved_out=(),
        sent=(),
        outputs=tuple(n for r, n in graph.tail_outputs if isinstance(r, Output)),
        buffer_updates=tuple((r.fqn, n) for r, n in graph.tail_outputs if isinstance(r, UpdatedBuffer)),
        gradients=tuple((r.fqn, n) for r, n in graph.tail_outputs if isinstance(r, Gradient)),
        tail_values=tuple((r, n) for r, n in graph.tail_outputs if isinstance(r, TailGradient)),
    )


def _recompute_before_use(body: Sequence[fx.Node], own: set[fx.Node]) -> Iterator[fx.Node]:
    """The body in order, with recomputed nodes (all but ``own``) moved in front of their first reader."""
    pending = {node for node in body if node not in own}

    def emit(node: fx.Node) -> Iterator[fx.Node]:
        waiting = [(node, iter(node.all_input_nodes))]
        while waiting:
            node, sources = waiting[-1]
            source = next((source for source in sources if source in pending), None)
            if source is None:
                yield node
                waiting.pop()
            else:
                pending.remove(source)
                waiting.append((source, iter(source.all_input_nodes)))

    for node in body:
        if node in own:
            yield from emit(node)
    for node in body:
        if node in pending:
            pending.remove(node)
            yield from emit(node)


def _results(graph: TrainingGraph, stage: int, phase: Phase) -> list[tuple[ResultRole, fx.Node]]:
    """The graph's outputs that the phase computes. The last stage returns outputs that no stage computes."""
    results = []
    for role, node in graph.outputs:
        computed = node.op == "call_function" and not is_constant(node)
        if stage == (stage_of(node) if computed else graph.num_stages - 1):
            own = node.meta["phase"] if computed else Phase.FORWARD
            node = node.all_input_nodes[0] if isinstance(role, TailInput) else node
            if own is phase or (phase is Phase.BACKWARD and own is not Phase.FORWARD):
                results.append((role, node))
    return results


def _closure(
    roots: Iterable[fx.Node], local: set[fx.Node], *, reads_changed: bool
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes to compute for the roots, and the values from outside that they need.

    With ``reads_changed``, buffers that the forward changes are read from the stage, not from outside.
    """
    body: set[fx.Node] = set()
    outside: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node in body or node in outside or is_constant(node) or _is_own_tensor(node, reads_changed):
            continue
        if node in local or is_view(node):
            body.add(node)
            if not _is_received(node):
                pending.extend(node.all_input_nodes)
        else:
            outside.add(node)
    return body, outside


def _is_received(node: fx.Node) -> bool:
    """Whether the value is received from another stage or from a collective."""
    return node.target is recv or is_collective(node)


def _is_own_tensor(node: fx.Node, reads_changed: bool) -> bool:
    """Whether a function reads the node from the stage's own tensors.

    Only the first function can do so with a buffer that the forward changes: later it has a new value.
    """
    if node.op != "placeholder":
        return False
    role = node.meta["role"]
    if isinstance(role, Buffer):
        return reads_changed or not node.meta["updated"]
    return isinstance(role, Parameter | Precomputed)


def _is_input(node: fx.Node) -> bool:
    return node.op == "placeholder" and isinstance(node.meta["role"], InputRole)


def _tensors(
    graph: TrainingGraph, functions: Sequence[PhaseFunction], tail: PhaseFunction | None
) -> dict[type, tuple[fx.Node, ...]]:
    """The arguments of the graph that a stage holds, by the type of their role.

    They are those that functions read, in this order, then what the tail reads, what is updated, and what
    precomputed values and batch counts are made of.
    """
    read = [n for function in functions for n in function.read_nodes if n.op == "placeholder"]
    roles: set[Any] = {
        node.meta["role"] for node in (tail.read_nodes if tail else ()) if node.op == "placeholder"
    }
    for function in (*functions, *([tail] if tail else [])):
        roles |= {Buffer(fqn) for fqn, _ in function.buffer_updates}
    for node in read:
        if isinstance(role := node.meta["role"], Precomputed):
            roles |= {*map(Parameter, role.fqns), *map(Buffer, role.buffers)}

    def held(kind: type) -> tuple[fx.Node, ...]:
        others = [node for node in graph.arguments if node.meta["role"] in roles]
        return tuple(dict.fromkeys(n for n in read + others if isinstance(n.meta["role"], kind)))

    roles |= {node.meta.get("role") for node in batch_count_nodes(graph, held(BatchCount))}
    return {kind: held(kind) for kind in (Parameter, Buffer, Precomputed, BatchCount)}


def batch_count_nodes(graph: TrainingGraph, read: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes of ``graph.batch_counts`` that compute the values ``read``, arguments included."""
    return _computing(graph.batch_counts, read)


def precomputed_nodes(graph: TrainingGraph, read: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes of ``graph.precomputed`` that compute the values ``read``, parameters included."""
    return _computing(graph.precomputed, read)


def _computing(side_graph: fx.Graph | None, read: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes of a side graph that compute the values of the arguments ``read``."""
    if side_graph is None:
        return []
    outputs: tuple[fx.Node, ...] = side_graph.output_node().args[0]  # type: ignore[assignment]
    needed = leading_to(outputs[node.meta["role"].index] for node in read)
    return [node for node in side_graph.nodes if node in needed]


def _constants(graph: TrainingGraph, functions: Sequence[PhaseFunction]) -> tuple[fx.Node, ...]:
    needed = leading_to(x for function in functions for x in function.read_nodes if is_constant(x))
    return tuple(node for node in graph.nodes if node in needed)
