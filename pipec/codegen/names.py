"""A Python identifier for every node, the same in every function, and the user's own variable name if known.

Names of modules and inputs come from the user's program, and could be code. Only this file
puts them into generated source, reduced to identifiers or to harmless comments.
"""

import builtins
import keyword
import operator
import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import fx

from pipec import primitives
from pipec.graph import (
    BatchCount,
    BatchFraction,
    LossGradient,
    ModelInput,
    OutputGradient,
    TailGradient,
    TailInput,
    TrainingGraph,
    is_data_dependent_number,
    is_forward,
    is_tensor,
    is_view,
    recv,
    send,
)
from pipec.torch_compat.run_time import OpOverload

RESERVED = frozenset(
    (
        *(
            "math",
            "torch",
            "frame",
            "w",
            "buffers",
            "constants",
            "precomputed",
            "rng",
            "saved",
            "b",
            "device",
        ),
        *("dropout", "call_with_generator", "primitives", "check_branch"),
        *("loss", "grad_loss", "batch_fraction"),
    )
)

ITEM_NAMES = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: ("", "logsumexp"),
    torch.ops.aten._scaled_dot_product_flash_attention.default: ("", "logsumexp"),
    torch.ops.aten._scaled_dot_product_efficient_attention.default: ("", "logsumexp"),
    torch.ops.aten.native_layer_norm.default: ("", "mean", "rstd"),
    torch.ops.aten.native_group_norm.default: ("", "mean", "rstd"),
    torch.ops.aten._native_batch_norm_legit_functional.default: ("", "mean", "rstd", "new_mean", "new_var"),
    torch.ops.aten.native_batch_norm_backward.default: ("grad_input", "grad_weight", "grad_bias"),
    torch.ops.aten.native_layer_norm_backward.default: ("grad_input", "grad_weight", "grad_bias"),
    torch.ops.aten.convolution_backward.default: ("grad_input", "grad_weight", "grad_bias"),
    torch.ops.aten.native_dropout.default: ("", "mask"),
    torch.ops.aten.max_pool2d_with_indices.default: ("", "indices"),
    primitives.RECURRENT_LAYER: ("", "h", "c"),
    primitives.RECURRENT_LAYER_BACKWARD: ("grad_x", "grad_h", "grad_c", *["grad_weight"] * 10),
}
"""The names of the items of operators that return several tensors."""

IMPLEMENTATION_WORDS = re.compile(
    r"native_|_legit_functional|scaled_dot_product_(flash_|efficient_|cudnn_)?|_for_cpu"
)
"""The parts of an operator's name that say how torch computes it; they are left out."""


def identifier(text: str) -> str:
    """The Python identifier that is most like a text."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or "value"
    return f"_{name}" if name[0].isdigit() else name


def safe_comment(text: str) -> str:
    """The text, safe for a comment or a docstring."""
    return re.sub(r"[^\w .,:<>()\[\]=+*/·-]", "?", text)


def name_nodes(graph: TrainingGraph) -> dict[fx.Node, str]:
    """Unique names for all nodes of the graph, in order. A message has the name of the value it carries."""
    names: dict[fx.Node, str] = {}
    has_loss = graph.mode.has_loss
    losses = {node for role, node in graph.returned if role.position == 0 and has_loss}
    tail_inputs = {node for role, node in graph.outputs if isinstance(role, TailInput)}
    taken = reserved_names(graph)
    results = _operator_results(graph)
    for node in graph.module.graph.nodes:
        if node.target in (send, recv):
            names[node] = names[node.args[0]]
        elif node.op == "placeholder" and isinstance(node.meta["role"], LossGradient):
            names[node] = "grad_loss"
        elif node.op == "placeholder" and isinstance(node.meta["role"], BatchFraction):
            names[node] = "batch_fraction"
        elif node in losses:
            names[node] = "loss"
        elif node in tail_inputs:
            names[node] = unique_name(f"{names[node.all_input_nodes[0]]}_rows", taken)
        elif node.op != "output":
            names[node] = unique_name(_base_name(graph, node, results), taken)
    others = [each for each in (graph.batch_counts, graph.precomputed, graph.tail) if each is not None]
    names |= dict.fromkeys(losses, "loss")
    return names | _names_in_others(graph, [node for each in others for node in each.nodes], names, taken)


def reserved_names(graph: TrainingGraph) -> set[str]:
    """Names that have another meaning in a stage's code."""
    return {*RESERVED, *keyword.kwlist, *dir(builtins), *graph.planned_sizes}


def _names_in_others(
    graph: TrainingGraph, nodes: Iterable[fx.Node], names: Mapping[fx.Node, str], taken: set[str]
) -> dict[fx.Node, str]:
    """Names for nodes of the other graphs; arguments have the names of the training graph."""
    arguments = {node.meta["role"]: names[node] for node in graph.arguments}
    arguments |= {role: names[node] for role, node in graph.outputs if isinstance(role, TailInput)}
    return {
        node: arguments[node.meta["role"]]
        if node.op == "placeholder"
        else unique_name(_operator_name(node), taken)
        for node in nodes
        if node.op != "output" and node not in names
    }


def _operator_results(graph: TrainingGraph) -> dict[int, fx.Node]:
    """For each operator, the node of the user's variable: its last forward tensor.

    For an operator that returns several tensors, it is the first of them. For a product, it is the product
    and not the view of it that is read, since views are written where they are read.
    """
    return {
        node.meta["operator"]: node
        for node in graph.nodes
        if is_forward(node)
        and is_tensor(node)
        and node.target not in (send, recv)
        and not _item(node)
        and not _is_view_of_result(node)
    }


def _is_view_of_result(node: fx.Node) -> bool:
    """Whether the node is a view of what the same operator computes."""
    source = node.all_input_nodes[0] if is_view(node) else node
    return source is not node and source.meta.get("operator") == node.meta["operator"] and not is_view(source)


def _item(node: fx.Node) -> int:
    """The node's position in a tuple; 0 for a node that is not an item."""
    return node.args[1] if node.target is operator.getitem else 0  # type: ignore[return-value]


def _base_name(graph: TrainingGraph, node: fx.Node, results: Mapping[int, fx.Node]) -> str:
    if node.op == "placeholder":
        role = node.meta["role"]
        if isinstance(role, BatchCount):
            return f"batch_{_operator_name(_source_of_batch(graph, role))}"
        if isinstance(role, TailGradient):
            return "grad_rows"
        if isinstance(role, OutputGradient):
            return f"grad_{_output_name(graph, role, results)}"
        return _input_name(role.path) if isinstance(role, ModelInput) else "buffer"
    cause: int = node.meta["operator"]
    if results.get(cause) is node:
        return _result_name(graph, cause, results)
    if not is_forward(node):
        awaited = [user.meta["operator"] for user in _readers(node) if user.meta["operator"] != cause]
        if awaited:
            return f"grad_{_result_name(graph, awaited[0], results)}"
    return _operator_name(node)


def _result_name(graph: TrainingGraph, operator: int, results: Mapping[int, fx.Node]) -> str:
    """The user's name for the result of an operator; for an item, the name of the tuple."""
    name = graph.operators[operator].name
    if name.startswith("getitem") and operator in results:
        return _operator_name(results[operator])
    return identifier(name)


def _output_name(graph: TrainingGraph, gradient: OutputGradient, results: Mapping[int, fx.Node]) -> str:
    """The user's name for the output whose gradient an argument is."""
    output = next(node for role, node in graph.returned if role.position == gradient.position)
    return _result_name(graph, output.meta["operator"], results) if "operator" in output.meta else "output"


def _source_of_batch(graph: TrainingGraph, role: BatchCount) -> fx.Node:
    """The node that computes a value of the whole mini-batch."""
    assert graph.batch_counts is not None
    made: tuple[fx.Node, ...] = graph.batch_counts.output_node().args[0]  # type: ignore[assignment]
    return made[role.index]


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The users of the node, on its own stage and on those it is sent to."""
    for user in node.users:
        if user.target in (send, recv):
            yield from _readers(user)
        elif user.op != "output":
            yield user


def _input_name(path: str) -> str:
    """``kwargs['input_ids']`` is ``input_ids``, ``args[0]`` is ``args_0``."""
    return identifier(re.sub(r"^kwargs", "", path))


def _operator_name(node: fx.Node) -> str:
    if node.target is operator.getitem:
        source, item = node.all_input_nodes[0], _item(node)
        known = ITEM_NAMES.get(source.target, ())  # type: ignore[call-overload]
        suffix = known[item] if item < len(known) else str(item)
        return "_".join(filter(None, [_operator_name(source), suffix]))
    if is_data_dependent_number(node):
        return "size"
    target = node.target
    name = target.overloadpacket.__name__ if isinstance(target, OpOverload) else str(target)
    return identifier(IMPLEMENTATION_WORDS.sub("", name.strip("_")))


def unique_name(base: str, taken: set[str]) -> str:
    """``base``, with a number if it is ``taken``; the name is added to ``taken``."""
    name, count = base, 0
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name
