"""Finds operators that torch computes with other kernels where gradients are disabled.

An example is attention with a mask that requires a gradient: the fused kernel cannot make it.
"""

from typing import Any

import torch
from torch import Tensor, fx

from pipec.capture.node_insertion import fake_value, inputs_of
from pipec.capture.repeated_blocks import constants_key, value_key
from pipec.torch_compat import FakeTensorMode, TorchDispatchMode, pytree, unbacked_symbols, without_symbols


def depends_on_grad_mode(graph: fx.Graph) -> bool:
    """Whether torch takes a call in a captured graph apart in another way if gradients are disabled.

    Each call of which an input has a gradient is run in both ways, equal calls once, on fake tensors of the
    traced sizes, without symbols. All functions in the graph are torch's.
    """
    seen = set[Any]()
    for node in graph.nodes:
        values = [*map(fake_value, inputs_of(node))]
        is_call = node.op in ("call_function", "call_method") and _name(node) not in _SIMPLE
        if not (is_call and any(map(_requires_grad, values))):
            continue
        if unbacked_symbols(fake_value(node)) or any(map(unbacked_symbols, values)):
            return True
        trained = tuple(_requires_grad(value) for value in values)
        given = tuple(source.op == "placeholder" for source in inputs_of(node))
        arguments = constants_key((node.args, node.kwargs)), tuple(map(value_key, values))
        key = node.op, node.target, arguments, trained, given
        if key not in seen and not _is_the_same(node):
            return True
        seen.add(key)
    return False


_SIMPLE = {
    *("add", "sub", "mul", "truediv", "neg", "pow", "rsqrt", "sqrt", "exp", "log", "sum", "mean", "tanh"),
    *("relu", "gelu", "silu", "sigmoid", "softmax", "mm", "bmm", "addmm", "cat", "split", "chunk", "getitem"),
    *("view", "transpose", "permute", "expand", "unsqueeze", "flatten", "contiguous", "to", "float"),
}
"""Names of calls that are one operator in any case, or views around it; they need not be run."""


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_the_same(node: fx.Node) -> bool:
    """Whether a call runs the same operators in both ways; not if it cannot be run by itself."""
    try:
        return _operators(node, training=True) == _operators(node, training=False)
    except Exception as error:
        return "leaf Variable" in str(error)  # it writes into its argument, in place


def _operators(node: fx.Node, training: bool) -> list[Any]:
    """The operators that a call runs, each with its constants and what it returns."""

    mode = FakeTensorMode()

    def value_of(source: fx.Node) -> Any:
        value = fake_value(source)
        concrete = without_symbols(value, mode)
        if _requires_grad(value) and isinstance(value, Tensor) and (training or source.op == "placeholder"):
            concrete.requires_grad_()
        return concrete

    with torch.set_grad_enabled(training):
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
        recorder = _Recorder()
        with mode, recorder:
            if node.op == "call_method":
                getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                node.target(*args, **kwargs)  # type: ignore[operator]
    return recorder.operators


class _Recorder(TorchDispatchMode):
    """Notes the operators that run, but for those that compute nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim" and func is not torch.ops.aten.detach.default:
            detached = pytree.tree_map_only(Tensor, Tensor.detach, result)
            arguments = pytree.tree_map_only(Tensor, lambda x: None, (args, kwargs or {}))
            self.operators.append((func, constants_key(arguments), value_key(detached)))
        return result


def _requires_grad(value: object) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_requires_grad, value))
    return isinstance(value, Tensor) and value.requires_grad
