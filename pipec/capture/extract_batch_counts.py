"""Moves the values computed of the whole mini-batch into a small graph of their own."""

from collections.abc import Iterable, Sequence

from torch import fx

from pipec.capture.markers import BATCH_COUNT, BATCH_FRACTION
from pipec.errors import CaptureError
from pipec.graph import (
    CHECK_BRANCH,
    ArgumentRole,
    BatchCount,
    BatchFraction,
    Buffer,
    InputBranches,
    ModelInput,
    is_check,
    is_collective,
    is_random,
    leading_to,
)


def extract_batch_counts(graph: fx.Graph) -> fx.Graph | None:
    """Let the graph take batch fractions and values of the mini-batch as arguments.

    Returns the graph that computes these values, in the order of their index; None if there are none. Its
    arguments have the roles that they have in ``graph``.

    Raises:
        CaptureError: such a value depends on more than the arguments of ``step``.
    """
    shares = [node for node in graph.nodes if node.target is BATCH_FRACTION]
    marked = [node for node in graph.nodes if node.target is BATCH_COUNT and node.users]
    if shares:
        _argument(graph, shares, "batch_fraction", BatchFraction())
    lifted = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    sources = [node.all_input_nodes[0] for node in marked]
    for node in _closure(graph, sources):
        _check(node)
        if node.target is BATCH_COUNT:
            copies[node] = copies[node.all_input_nodes[0]]
        else:
            copies[node] = lifted.node_copy(node, copies.__getitem__)
    lifted.output(tuple(copies[source] for source in sources))
    roles = [BatchCount(index, _adds_up(graph, node)) for index, node in enumerate(marked)]
    for role, node in zip(roles, marked, strict=True):
        _argument(graph, [node], f"batch_count_{role.index}", role)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function" and not is_check(node):
            graph.erase_node(node)
    return lifted if marked else None


def input_branches(graph: fx.Graph, batch_counts: fx.Graph | None) -> InputBranches:
    """The branches that depend on whole arguments and on values of the mini-batch alone."""
    made: Sequence[fx.Node] = batch_counts.output_node().args[0] if batch_counts else ()  # type: ignore[assignment]
    merged, copies, found = fx.Graph(), dict[fx.Node, fx.Node](), list[fx.Node]()
    for assumed in graph.find_nodes(op="call_function", target=CHECK_BRANCH):
        needed = _closure(graph, assumed.all_input_nodes)
        origins = {
            x: made[x.meta["role"].index] for x in needed if isinstance(x.meta.get("role"), BatchCount)
        }
        whole = _closure(batch_counts, origins.values()) if batch_counts else []
        if all(_is_from_arguments(node, False) for node in needed) and all(
            _is_from_arguments(node, True) for node in whole
        ):
            found.append(assumed)
            for node in whole + needed:
                if node in origins:
                    copies[node] = copies[origins[node]]
                elif node not in copies:
                    copies[node] = merged.node_copy(node, copies.__getitem__)
    merged.output(tuple(copies[assumed.all_input_nodes[0]] for assumed in found))
    return InputBranches(
        merged,
        tuple(node.meta["role"].position for node in merged.find_nodes(op="placeholder")),
        tuple(bool(assumed.args[1]) for assumed in found),
        tuple(str(assumed.args[2]) for assumed in found),
    )


def _is_from_arguments(node: fx.Node, batch_counts: bool) -> bool:
    """Whether a node needs nothing but arguments of ``step``, and rows of them only where all are there."""
    role = node.meta.get("role")
    if node.op == "placeholder":
        return isinstance(role, BatchCount) or (
            isinstance(role, ModelInput) and (batch_counts or not role.batched)
        )
    return not is_random(node) and not is_collective(node)


def _argument(graph: fx.Graph, nodes: Sequence[fx.Node], name: str, role: ArgumentRole) -> None:
    """Replace ``nodes`` by an argument of the graph."""
    with graph.inserting_before(next(iter(graph.nodes))):
        argument = graph.placeholder(name)
    argument.meta.update(val=nodes[0].meta["val"], role=role)
    for node in nodes:
        node.replace_all_uses_with(argument)


def _adds_up(graph: fx.Graph, marked: fx.Node) -> bool:
    """Whether a value is a sum over rows, and none of its terms needs another value of the whole batch."""
    source, is_sum = marked.args
    assert isinstance(source, fx.Node)
    return bool(is_sum) and not any(node.target is BATCH_COUNT for node in _closure(graph, [source]))


def _closure(graph: fx.Graph, sources: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes that lead to ``sources``, in order."""
    needed = leading_to(sources)
    return [node for node in graph.nodes if node in needed]


def _check(node: fx.Node) -> None:
    role = node.meta.get("role")
    fixed = isinstance(role, Buffer) and not node.meta["updated"]
    if is_random(node) or (node.op == "placeholder" and not fixed and not isinstance(role, ModelInput)):
        what = f"is drawn at random ({node.name})" if role is None else f"depends on {role}"
        raise CaptureError(
            f"the loss needs a value of the whole mini-batch that {what}, which is not known before the "
            "step. Say how much a microbatch's loss counts, with microbatch_weight=..."
        )
