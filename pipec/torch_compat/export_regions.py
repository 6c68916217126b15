"""Puts the regions of an exported graph in which gradients or autocast are set in place of their calls.

::

    s = wrap_with_set_grad_enabled(False, body, x)         _set_grad_enabled(False)
                                                     ->    s = cos(x)
    body(x):  return cos(x)                                _set_grad_enabled(True)

Dynamo's graphs have this form, too. In it, the analyses of a graph see what a region reads and writes.
"""

from typing import Any

import torch
from torch import fx
from torch.amp import autocast_mode
from torch.nn import Module

_GRAD_MODE, _AUTOCAST = (
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
)


def inline_regions(module: fx.GraphModule) -> None:
    """Inline all regions of a graph, also those inside of others."""
    while calls := [node for node in module.graph.nodes if node.target in (_GRAD_MODE, _AUTOCAST)]:
        for call in calls:
            _inline(module, call)
    module.recompile()


def _inline(module: Module, call: fx.Node) -> None:
    num_settings = 1 if call.target is _GRAD_MODE else 4
    settings, (attribute, *arguments) = call.args[:num_settings], call.args[num_settings:]
    assert isinstance(attribute, fx.Node)
    body: Any = module.get_submodule(str(attribute.target))
    copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), arguments, strict=True))
    with call.graph.inserting_before(call):
        entered = _setting(call, *_enter(call, settings))
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copies[node] = call.graph.node_copy(node, copies.__getitem__)
            if node.op == "get_attr":
                copies[node].target = f"{attribute.target}.{node.target}"
        _setting(call, *_leave(call, settings, entered))
    results: Any = body.graph.output_node().args[0]
    for user in [*call.users]:
        user.replace_all_uses_with(copies[results[user.args[1]]])
        call.graph.erase_node(user)
    call.graph.erase_node(call)
    if not attribute.users:
        call.graph.erase_node(attribute)


def _enter(call: fx.Node, settings: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    enter = torch._C._set_grad_enabled if call.target is _GRAD_MODE else autocast_mode._enter_autocast
    return enter, settings


def _leave(call: fx.Node, settings: tuple[Any, ...], entered: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Export makes a region only of what sets gradients otherwise than around it."""
    if call.target is _GRAD_MODE:
        return torch._C._set_grad_enabled, (not settings[0],)
    return autocast_mode._exit_autocast, (entered,)


def _setting(call: fx.Node, function: Any, args: tuple[Any, ...]) -> fx.Node:
    made = call.graph.call_function(function, args)
    made.meta = {key: call.meta[key] for key in ("nn_module_stack", "stack_trace") if key in call.meta}
    return made
