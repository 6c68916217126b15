"""The rules that a training graph must meet after every pass, by the level that it has reached."""

from collections.abc import Callable, Iterator

import torch
from torch import fx

from pipec.errors import VerifyError
from pipec.graph import (
    Buffer,
    Gradient,
    LoweringLevel,
    TrainingGraph,
    UpdatedBuffer,
    has_data_dependent_size,
    is_collective,
    is_constant,
    is_forward,
    is_tensor,
    recv,
    segment_of,
    send,
    source_parameters,
    stage_of,
)
from pipec.ir import Phase

Violation = tuple[fx.Node, str]
Rule = Callable[[TrainingGraph], Iterator[Violation]]

CONTEXT_LINES = 3


def verify_graph(graph: TrainingGraph, after: object = "capture") -> None:
    """Check every rule of the level that the graph has reached.

    Raises:
        VerifyError: a rule is broken; it names the pass, the stage and the node.
    """
    graph.module.graph.lint()
    for level, rules in RULES.items():
        if graph.level < level:
            break
        for rule in rules:
            for node, problem in rule(graph):
                raise VerifyError(_message(graph, after, node, problem))


def _message(graph: TrainingGraph, after: object, node: fx.Node, problem: str) -> str:
    stage = f"stage {node.meta['stage']}, " if "stage" in node.meta else ""
    operator = graph.operators[node.meta["operator"]] if "operator" in node.meta and graph.operators else None
    where = f" ({operator.module} at {operator.source})" if operator else ""
    return f"after {after!r}: {stage}node {node.name}{where}: {problem}\n{_context(graph, node)}"


def _context(graph: TrainingGraph, node: fx.Node) -> str:
    nodes = list(graph.module.graph.nodes)
    position = nodes.index(node)
    start = max(0, position - CONTEXT_LINES)
    lines = []
    for other in nodes[start : position + CONTEXT_LINES + 1]:
        marker = ">" if other is node else " "
        lines.append(f"{marker} [{other.meta.get('stage', '-')}] {other.format_node()}")
    return "\n".join(lines)


def _nodes_are_classified(graph: TrainingGraph) -> Iterator[Violation]:
    for node in graph.nodes:
        for key in ("val", "operator", "phase"):
            if key not in node.meta:
                yield (
                    node,
                    f"has no {key!r}; a new node copies the meta of the node that it replaces",
                )


def _forward_never_reads_backward(graph: TrainingGraph) -> Iterator[Violation]:
    for node in filter(is_forward, graph.nodes):
        for source in node.all_input_nodes:
            if not is_forward(source):
                yield node, f"runs in the forward but reads {source.name}, which the backward computes"


def _every_node_has_a_stage(graph: TrainingGraph) -> Iterator[Violation]:
    for node in graph.nodes:
        if not is_constant(node) and not isinstance(node.meta.get("stage"), int):
            yield node, "belongs to no stage"


def _edges_follow_the_pipeline(graph: TrainingGraph) -> Iterator[Violation]:
    for source, user in _stage_edges(graph):
        if is_forward(source) and is_forward(user) and stage_of(source) > stage_of(user):
            yield user, f"reads {source.name} of the later stage {stage_of(source)}: a forward edge goes back"
        if not is_forward(source) and stage_of(source) < stage_of(user):
            yield (
                user,
                f"reads {source.name} of the earlier stage {stage_of(source)}: a gradient goes forward",
            )


def _changed_buffers_have_one_stage(graph: TrainingGraph) -> Iterator[Violation]:
    stages = {role.fqn: stage_of(n) for role, n in graph.outputs if isinstance(role, UpdatedBuffer)}
    for node in graph.arguments:
        role = node.meta["role"]
        if isinstance(role, Buffer) and role.fqn in stages:
            for user in node.users:
                if user.op == "call_function" and stage_of(user) != stages[role.fqn]:
                    yield user, f"reads buffer {role.fqn}, which stage {stages[role.fqn]} changes"


def _gradients_have_one_stage_each(graph: TrainingGraph) -> Iterator[Violation]:
    seen: dict[tuple[str, int], fx.Node] = {}
    for role, node in graph.outputs:
        if isinstance(role, Gradient):
            key = role.fqn, stage_of(node)
            if key in seen:
                yield node, f"is a second gradient of {role.fqn} on the same stage, besides {seen[key].name}"
            seen[key] = node


def _gradients_have_owners(graph: TrainingGraph) -> Iterator[Violation]:
    users: dict[str, set[int]] = {}
    for argument in graph.arguments:
        for fqn in source_parameters(argument):
            users.setdefault(fqn, set()).update(
                stage_of(user) for user in argument.users if user.op == "call_function"
            )
    for role, node in graph.outputs:
        if isinstance(role, Gradient) and stage_of(node) not in users[role.fqn]:
            yield (
                node,
                f"is the gradient of {role.fqn}, but stage {stage_of(node)} does not hold that parameter",
            )


def _only_messages_cross_stages(graph: TrainingGraph) -> Iterator[Violation]:
    for source, user in _stage_edges(graph):
        if stage_of(source) != stage_of(user) and user.target is not recv:
            yield user, f"reads {source.name} of stage {stage_of(source)} without a send and a recv"


def _messages_have_known_sizes(graph: TrainingGraph) -> Iterator[Violation]:
    for node in graph.nodes:
        if node.target is send and has_data_dependent_size(node.all_input_nodes[0]):
            value = node.all_input_nodes[0].name
            yield node, f"sends {value}, whose size depends on values: no stage could receive it"


def _messages_match(graph: TrainingGraph) -> Iterator[Violation]:
    for node in graph.nodes:
        if node.target is send:
            receivers = [user for user in node.users if user.target is recv]
            if len(receivers) != 1 or len(node.users) != 1:
                yield node, f"must be received exactly once, but has {len(node.users)} users"
            elif stage_of(receivers[0]) != node.args[1]:
                yield node, f"goes to stage {node.args[1]} but stage {stage_of(receivers[0])} receives it"
        elif node.target is recv:
            source = node.args[0]
            if not isinstance(source, fx.Node) or source.target is not send:
                yield node, "receives something that was not sent"
            elif not _same_type(source, node):
                yield node, f"expects {_type(node)} but {source.name} carries {_type(source)}"


def _segments_are_ordered(graph: TrainingGraph) -> Iterator[Violation]:
    """A segment reads no value of a later segment: not of its own phase, and not of another."""
    for source, user in _stage_edges(graph):
        same_pass = stage_of(source) == stage_of(user) and is_forward(source) == is_forward(user)
        if same_pass and segment_of(source) > segment_of(user):
            yield (
                user,
                f"runs in segment {segment_of(user)} but reads {source.name} of segment {segment_of(source)}",
            )


def _collectives_begin_segments(graph: TrainingGraph) -> Iterator[Violation]:
    """A segment ends with the input of a collective, and the next one begins with its result."""
    for node in filter(is_collective, graph.nodes):
        source = node.all_input_nodes[0]
        is_local = source.op == "call_function" and not is_constant(source) and _place(source) == _place(node)
        if is_local or not segment_of(node):
            yield node, f"begins no segment: it is in segment {segment_of(node)}, and reads {source.name}"
        if node.meta["phase"] is Phase.BACKWARD_WEIGHT:
            yield node, "waits for other replicas in the weight gradient; expected it in the input gradient"


def _stage_edges(graph: TrainingGraph) -> Iterator[tuple[fx.Node, fx.Node]]:
    for user in graph.nodes:
        if is_constant(user):
            continue
        for source in user.all_input_nodes:
            if source.op == "call_function" and not is_constant(source):
                yield source, user


def _place(node: fx.Node) -> tuple[int, Phase, int]:
    return stage_of(node), node.meta["phase"], segment_of(node)


def _type(node: fx.Node) -> str:
    value = node.meta["val"]
    return f"{value.dtype}{list(value.shape)}" if is_tensor(node) else type(value).__name__


def _same_type(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta["val"], other.meta["val"]
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _type(one) == _type(other)


RULES: dict[LoweringLevel, tuple[Rule, ...]] = {
    LoweringLevel.CAPTURED: (_nodes_are_classified, _forward_never_reads_backward),
    LoweringLevel.CUT: (
        _every_node_has_a_stage,
        _edges_follow_the_pipeline,
        _changed_buffers_have_one_stage,
        _gradients_have_one_stage_each,
        _gradients_have_owners,
    ),
    LoweringLevel.COMMUNICATION_INSERTED: (
        _only_messages_cross_stages,
        _messages_have_known_sizes,
        _messages_match,
    ),
    LoweringLevel.BACKWARD_SPLIT: (
        _segments_are_ordered,
        _collectives_begin_segments,
    ),
}
