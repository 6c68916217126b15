"""Splits the fused operators that attention modules of torch call in evaluation mode.

``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` then call one operator that reads all their
weights. Each weight must be on the stage where training reads it, and the cut may be inside the layer. So the
operator is replaced by several, whose results differ from its own by rounding.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from pipec.capture.node_insertion import insert_part
from pipec.torch_compat import ATTENTION, ENCODER_LAYER


def split_fused_attention(captured: fx.GraphModule) -> None:
    """Replace the fused operators of a captured graph, in place."""
    for module in captured.modules():
        if isinstance(module, fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target in _PARTS and _is_self_attention(node):
                    _replace(node, _PARTS[node.target])
            module.recompile()


def _is_self_attention(node: fx.Node) -> bool:
    """Whether query, key and value are one tensor, as in every call that torch's modules make."""
    return _PARTS[node.target] is _encoder_layer or node.args[0] is node.args[1] is node.args[2]


def _replace(node: fx.Node, parts: Callable[..., Any]) -> None:
    """Replace a call by the calls that ``parts`` makes of its arguments."""
    call = functools.partial(insert_part, node, "part")
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


def _encoder_layer(call: Call, x: fx.Node, width: int, num_heads: int, *others: Any) -> fx.Node:
    in_weight, in_bias, out_weight, out_bias, is_gelu, norm_first, eps = others[:7]
    first, second, ffn = others[7:9], others[9:11], others[11:15]
    mask, mask_type = (*others[15:], None, None)[:2]

    def attention(x: fx.Node) -> fx.Node:
        weights = in_weight, in_bias, out_weight, out_bias
        return _attention(call, x, x, x, width, num_heads, *weights, mask, False, mask_type=mask_type)[0]

    def feed_forward(x: fx.Node) -> fx.Node:
        hidden = call(F.gelu if is_gelu else torch.relu, call(F.linear, x, *ffn[:2]))
        return call(F.linear, hidden, *ffn[2:])

    def norm(x: fx.Node, weights: tuple[fx.Node, fx.Node]) -> fx.Node:
        return call(F.layer_norm, x, (width,), *weights, eps)

    if norm_first:
        x = call(torch.add, x, attention(norm(x, first)))
        return call(torch.add, x, feed_forward(norm(x, second)))
    x = norm(call(torch.add, x, attention(x)), first)
    return norm(call(torch.add, x, feed_forward(x)), second)


_PARTS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys(ENCODER_LAYER, _encoder_layer),
    **dict.fromkeys(ATTENTION, _attention),
}
