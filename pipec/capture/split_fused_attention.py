"""Splits the fused operators that attention modules of torch call in evaluation mode.

``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` then call one operator that reads all their
weights. Each weight must be on the stage where training reads it, and the cut may be inside the layer. So the
operator is replaced by several, whose results differ from its own by rounding.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pipec.capture.node_insertion import fake_value


def split_fused_attention(captured: fx.GraphModule) -> None:
    """Replace the fused operators of a captured graph, in place."""
    for module in captured.modules():
        if isinstance(module, fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target in _PARTS:
                    _replace(node, _PARTS[node.target])
            module.recompile()


def _replace(node: fx.Node, parts: Callable[..., Any]) -> None:
    """Replace a call by the calls that ``parts`` makes, which are traced with its arguments."""

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        with node.graph.inserting_before(node):
            made = node.graph.create_node("call_function", function, args, kwargs, f"{node.name}_part")
        made.meta = dict(node.meta)
        key = "example_value" if "example_value" in made.meta else "val"
        values = fx.map_arg((args, kwargs), fake_value)
        made.meta[key] = function(*values[0], **values[1])
        return made

    result = parts(call, *node.args, **node.kwargs)
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


Call = Callable[..., fx.Node]
"""Inserts a call of a function, and returns its node."""


def _attention(
    call: Call,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    width: int,
    num_heads: int,
    in_weight: fx.Node,
    in_bias: fx.Node,
    out_weight: fx.Node,
    out_bias: fx.Node,
    mask: fx.Node | None = None,
    need_weights: bool = True,
    average_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[fx.Node, fx.Node | None]:
    """Self-attention: the rows of its output, and the weights if they are needed."""
    rows = call(F.linear, query, in_weight, in_bias)
    heads = call(Tensor.unflatten, rows, 2, (3, num_heads, width // num_heads))
    q, k, v = (call(Tensor.transpose, call(Tensor.select, heads, 2, part), 1, 2) for part in range(3))
    scores = call(
        torch.matmul, call(torch.mul, q, (width // num_heads) ** -0.5), call(Tensor.transpose, k, -2, -1)
    )
    if mask is not None:
        hidden = call(Tensor.to, mask, torch.bool)
        if mask_type == _OF_KEYS:
            hidden = call(Tensor.unsqueeze, call(Tensor.unsqueeze, hidden, 1), 1)
        scores = call(Tensor.masked_fill, scores, hidden, float("-inf"))
    weights = call(torch.softmax, scores, -1)
    mixed = call(Tensor.flatten, call(Tensor.transpose, call(torch.matmul, weights, v), 1, 2), 2)
    output = call(F.linear, mixed, out_weight, out_bias)
    if not need_weights:
        return output, None
    return output, call(torch.mean, weights, 1) if average_weights else weights


_OF_KEYS = 1
"""The type of a mask of shape (rows, length); others broadcast to (rows, heads, length, length)."""


def _encoder_layer(
    call: Call,
    x: fx.Node,
    width: int,
    num_heads: int,
    in_weight: fx.Node,
    in_bias: fx.Node,
    out_weight: fx.Node,
    out_bias: fx.Node,
    is_gelu: bool,
    norm_first: bool,
    eps: float,
    *weights: Any,
) -> fx.Node:
    norm1_weight, norm1_bias, norm2_weight, norm2_bias, *ffn = weights[:8]
    mask, mask_type = (*weights[8:], None, None)[:2]

    def attention(x: fx.Node) -> fx.Node:
        projections = in_weight, in_bias, out_weight, out_bias
        output, _ = _attention(
            call, x, x, x, width, num_heads, *projections, mask, need_weights=False, mask_type=mask_type
        )
        return output

    def feed_forward(x: fx.Node) -> fx.Node:
        hidden = call(F.gelu if is_gelu else torch.relu, call(F.linear, x, *ffn[:2]))
        return call(F.linear, hidden, *ffn[2:])

    def norm1(x: fx.Node) -> fx.Node:
        return call(F.layer_norm, x, (width,), norm1_weight, norm1_bias, eps)

    def norm2(x: fx.Node) -> fx.Node:
        return call(F.layer_norm, x, (width,), norm2_weight, norm2_bias, eps)

    if norm_first:
        x = call(torch.add, x, attention(norm1(x)))
        return call(torch.add, x, feed_forward(norm2(x)))
    x = norm1(call(torch.add, x, attention(x)))
    return norm2(call(torch.add, x, feed_forward(x)))


_PARTS: Mapping[Any, Callable[..., Any]] = {
    torch._transformer_encoder_layer_fwd: _encoder_layer,
    torch._native_multi_head_attention: _attention,
    torch.ops.aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    torch.ops.aten._native_multi_head_attention.default: _attention,
}
