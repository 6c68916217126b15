"""FlexAttention as ordinary operators, which are differentiated, cut and batched like others.

::

    y = flex_attention(q, k, v, score_mod, mask)  ->  s = score_mod((q @ k.T) * scale, b, h, i, j)
                                                      y = where(mask(b, h, i, j), s, -inf).softmax(-1) @ v

The functions of a score or a mask are written for one pair of a query and a key. Here they run once for all
pairs, on indices that broadcast, so each of their calls must work element by element. The blocks that
``create_block_mask`` makes of the function are not used: scores take memory of the square of the length.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pipec.capture.graph_calls import at_line, fake_value, operator_name
from pipec.errors import CaptureError

_ELEMENTWISE = frozenset(
    (
        *("abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bool", "ceil", "clamp"),
        *("cos", "div", "eq", "exp", "exp2", "float", "floor", "floor_divide", "floordiv", "ge", "getitem"),
        *("gt", "int", "invert", "le", "log", "log2", "logical_and", "logical_not", "logical_or"),
        *("logical_xor", "long", "lt", "maximum", "minimum", "mod", "mul", "ne", "neg", "new_full"),
        *("new_ones", "new_zeros", "pow", "relu", "remainder", "round", "rsqrt", "sigmoid", "sign", "sin"),
        *("sqrt", "square", "sub", "tanh", "to", "truediv", "where", "and", "or", "xor"),
    )
)

_NO_BLOCKS = 1 << 30
"""The size of the blocks that torch makes where there is no mask: each has all."""


def dense_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: fx.Proxy,
    block_mask: Sequence[Any],
    scale: float,
    options: object,
    score_arguments: Sequence[fx.Proxy] = (),
    mask_arguments: Sequence[fx.Proxy] = (),
) -> Any:
    """The calls that compute ``f32[batch, heads, queries, width]``, in a tuple; None if more is returned.

    Raises:
        CaptureError: a function of scores or masks is not elementwise, or a mask is made of blocks alone.
    """
    call = query.tracer.call
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in call.users):
        return None
    own, shared = (fake_value(each.node) for each in (query, key))
    groups = own.shape[1] // shared.shape[1]
    if groups > 1:
        key, value = (each.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for each in (key, value))
    scores = _products(query, key.transpose(-2, -1))
    if own.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    sizes = [(query, 0), (query, 1), (query, 2), (key, 2)]
    indices = [_index(each, dim, place) for place, (each, dim) in enumerate(sizes)]
    scores = _inlined(call, score_mod, [scores * scale, *indices, *score_arguments])
    if min(block_mask[-3:-1]) < _NO_BLOCKS and not _reads_indices(call, block_mask[-1]):
        raise CaptureError(
            f"the mask of flex_attention has blocks and no function, and blocks are not used{at_line(call)}\n"
            "Pass the function, as create_block_mask does; or scaled_dot_product_attention with a mask"
        )
    mask = _inlined(call, block_mask[-1], [*indices, *mask_arguments])
    scores = scores.masked_fill(mask.logical_not(), -math.inf)
    is_masked = (scores == -math.inf).all(-1, keepdim=True)  # such a query has zeros
    weights = scores.masked_fill(is_masked, 0.0).softmax(-1).masked_fill(is_masked, 0.0)
    return (_products(weights.to(own.dtype), value),)


def _products(first: Any, second: Any) -> Any:
    """Products of all rows and heads. In four dimensions, torch 2.11 makes a constant of the rows."""
    heads = fake_value(first.node).shape[1]
    made: Any = torch.bmm(first.flatten(0, 1), second.flatten(0, 1))
    return made.unflatten(0, (-1, heads))


def _index(tensor: fx.Proxy, dim: int, place: int) -> fx.Proxy:
    """The indices along a dimension, as ``place`` of ``[batch, heads, queries, keys]``."""
    kind = {"device": fake_value(tensor.node).device, "dtype": torch.int32}
    made = tensor.tracer.create_proxy("call_function", torch.arange, (tensor.size(dim),), kind)
    return made.view([-1 if each == place else 1 for each in range(4)])


def _graph_of(call: fx.Node, function: fx.Proxy) -> fx.Graph:
    module: Any = operator.attrgetter(str(function.node.target))(call.graph.owning_module)
    graph: fx.Graph = module.graph
    return graph


def _reads_indices(call: fx.Node, mask: fx.Proxy) -> bool:
    """Whether a mask is more than ones like an index, which torch puts in the place of no function."""
    calls = [node for node in _graph_of(call, mask).nodes if node.op not in ("placeholder", "output")]
    return [operator_name(node) for node in calls] != ["new_ones"]


def _inlined(call: fx.Node, function: fx.Proxy, arguments: Sequence[Any]) -> Any:
    """What a function of single pairs computes of all of them."""
    graph = _graph_of(call, function)
    values: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), arguments, strict=True))
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return args[0]
        if operator_name(node) not in _ELEMENTWISE or fake_value(node).ndim:
            raise CaptureError(
                f"a function of flex_attention calls {operator_name(node)}, which is not known to work "
                f"element by element on indices of queries and keys{at_line(node)}{at_line(call)}\n"
                "Use arithmetic, comparisons, torch.where, and tensors indexed in all dimensions at once, "
                "such as documents[b, q]; or scaled_dot_product_attention with a mask"
            )
        values[node] = function.tracer.create_proxy(node.op, node.target, args, kwargs)
    raise AssertionError("a graph ends with its output")
