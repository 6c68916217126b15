"""Puts pipec's operators into a captured graph, in the place of calls that torch would decompose.

::

    y, h = gru(x, s, [w0, ..., w7], True, 2, ...)      gru_l0 = recurrent_layer(x, s[0:1], [w0, ..., w3], ...)
                                                  ->  gru_l1 = recurrent_layer(gru_l0[0], s[1:2], ...)
                                                      y, h = gru_l1[0], cat([gru_l0[1], gru_l1[1]])

Each layer of a recurrent network is then an operator of its own, so that cuts fall between them.
``pipec.primitives`` has what the operators compute: what eager torch does, with its bits.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from pipec.capture.flex_attention import dense_attention
from pipec.capture.graph_calls import fake_value
from pipec.primitives import (
    INTERPOLATE,
    INTERPOLATED_DIMENSIONS,
    ctc_loss,
    recurrent_layer,
    recurrent_network,
)
from pipec.torch_compat.symbolic_numbers import formula

_aten = torch.ops.aten

_mapped: Callable[..., Any] = fx.map_arg


def use_own_operators(captured: fx.GraphModule) -> None:
    """Replace these calls of a captured graph, in place."""
    for module in captured.modules():
        if isinstance(module, fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target in _REPLACED:
                    _replace(node, _REPLACED[node.target])
            module.recompile()


def _replace(call: fx.Node, function: Callable[..., Any]) -> None:
    """Replace a call by the calls that ``function`` makes of its arguments; None leaves it as it is.

    A tuple replaces the items of the call, of which every reader takes one.
    """
    parts = _Parts(call)
    with call.graph.inserting_before(call):
        args, kwargs = _mapped((call.args, call.kwargs), lambda node: fx.Proxy(node, parts))
        result = function(*args, **kwargs)
    if result is None:
        return
    if isinstance(result, fx.Proxy):
        call.replace_all_uses_with(result.node)
    else:
        for user in list(call.users):
            user.replace_all_uses_with(result[user.args[1]].node)
            call.graph.erase_node(user)
    for node in (call, *reversed(parts.made)):
        _erase_unused(node)


def _erase_unused(node: fx.Node) -> None:
    """Erase a node that nothing reads, and the tensors that are computed for it alone."""
    if node.users or node.op == "placeholder" or not isinstance(fake_value(node), torch.Tensor | tuple):
        return
    read = node.all_input_nodes
    node.graph.erase_node(node)
    for each in read:
        _erase_unused(each)


class _Parts(fx.proxy.GraphAppendingTracer):
    """Makes the nodes that replace a call. They have its meta, and fake values of their own."""

    def __init__(self, call: fx.Node) -> None:
        super().__init__(call.graph)
        self.call, self.made = call, list[fx.Node]()
        given = map(fake_value, call.all_input_nodes)
        first: Any = next(each for each in given if isinstance(each, torch.Tensor))
        self.fake_mode = first.fake_mode

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, *others: Any
    ) -> fx.Node:
        own = self.call.name
        if target is recurrent_layer:
            own += f"_l{sum(node.target is target for node in self.made)}"
        node = super().create_node(kind, target, args, kwargs, own, *others)
        key = "example_value" if "example_value" in self.call.meta else "val"
        given, named = _mapped((args, kwargs), fake_value)
        function = getattr(type(given[0]), target) if kind == "call_method" else target
        with self.fake_mode:  # numbers become tensors, too
            node.meta = {**self.call.meta, key: function(*given, **named)}
        self.made.append(node)
        return node


def _recurrent(cell: str, *args: Any, **kwargs: Any) -> Any:
    """A call on packed sequences stays as it is; its weights are the fourth argument."""
    is_packed = len(args) > 3 and isinstance(args[3], list | tuple)
    return None if is_packed or kwargs else recurrent_network(cell, *args)


def _interpolate(
    input: fx.Proxy,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """For deterministic algorithms on a GPU, eager torch makes the decomposition as well."""
    is_decomposed = torch.are_deterministic_algorithms_enabled() and not fake_value(input.node).is_cpu
    if mode not in INTERPOLATED_DIMENSIONS or antialias or is_decomposed:
        return None
    size, scale_factor = (
        [each] * INTERPOLATED_DIMENSIONS[mode] if isinstance(each, int | float | fx.Proxy) else each
        for each in (size, scale_factor)
    )
    options = mode, bool(align_corners), bool(recompute_scale_factor)
    return INTERPOLATE(input, size, scale_factor, *options)


def _upsample(
    mode: str, x: fx.Proxy, size: Any, align_corners: bool, scale_factors: Sequence[float] | None = None
) -> Any:
    return _interpolate(x, size, scale_factors, mode, align_corners)


def _ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *others: Any, **kwargs: Any
) -> Any:
    """With lengths that are Python numbers, the batch size is a constant, and torch traces its own call."""
    if not all(isinstance(lengths, fx.Proxy) for lengths in (input_lengths, target_lengths)):
        return None
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, *others, **kwargs)


def _cat(tensors: Any, *dim: Any, **named: Any) -> Any:
    """``cat([tensor([]), x], 1)``, as a cache of keys and values begins, is a copy of ``x``."""
    values = [fake_value(each.node) for each in tensors] if isinstance(tensors, list | tuple) else []
    filled = [k for k, value in enumerate(values) if [*map(formula, value.shape)] != [0]]
    if len(filled) != 1 or len(values) == 1 or len({value.dtype for value in values}) > 1 or "out" in named:
        return None
    return torch.clone(tensors[filled[0]], memory_format=torch.contiguous_format)


_REPLACED: Mapping[Any, Callable[..., Any]] = {
    **{
        function: functools.partial(_recurrent, cell)
        for cell, functions in {
            "lstm": (torch.lstm, _aten.lstm.input),
            "gru": (torch.gru, _aten.gru.input),
            "tanh": (torch.rnn_tanh, _aten.rnn_tanh.input),
            "relu": (torch.rnn_relu, _aten.rnn_relu.input),
        }.items()
        for function in functions
    },
    F.interpolate: _interpolate,
    **{
        getattr(_aten, f"upsample_{mode}{dimensions}d").vec: functools.partial(_upsample, mode)
        for mode, dimensions in INTERPOLATED_DIMENSIONS.items()
    },
    torch.ops.higher_order.flex_attention: dense_attention,
    **dict.fromkeys((torch.cat, _aten.cat.default), _cat),
    **dict.fromkeys((torch.ctc_loss, F.ctc_loss, _aten.ctc_loss.Tensor), _ctc_loss),
}
"""The calls that are replaced, as either front end writes them."""
