"""The calls in a captured graph, whichever front end made it: names, arguments, source lines, new ones."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pipec.capture.diagnosis import SourceLine, innermost_model_line, traceback_lines
from pipec.capture.markers import BATCH_FRACTION
from pipec.torch_compat.run_time import OpOverload, is_higher_order, schema

_RANDOM = {
    *("alpha_dropout", "bernoulli", "cauchy", "dropout", "dropout1d", "dropout2d"),
    *("dropout3d", "exponential", "feature_alpha_dropout", "geometric", "gumbel_softmax"),
    *("log_normal", "multinomial", "native_dropout", "normal", "poisson", "random", "rrelu", "uniform"),
}

HOLDING_NUMBERS = {"tensor", "as_tensor", "new_tensor", "asarray"}
"""Calls that make a tensor of numbers in their arguments."""

_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def operator_name(node: fx.Node) -> str:
    """``cross_entropy``, ``truediv`` or ``add``, whichever front end wrote the call, in place or not."""
    return _raw_name(node).strip("_")


def source_line(node: fx.Node) -> SourceLine | None:
    """The line of the model that made the node, unless torch lost it."""
    return innermost_model_line(traceback_lines(node.meta.get("stack_trace") or ""))


def describe_call(node: fx.Node) -> str:
    """``amax at model.py:12: x.amax(0)``"""
    line = source_line(node)
    return f"{operator_name(node)} at {line}" if line else operator_name(node)


def at_line(node: fx.Node) -> str:
    """The line of the model that made the node, on a line of its own; empty where torch lost it."""
    line = source_line(node)
    return f"\n  at {line}" if line else ""


def mutates_argument(node: fx.Node) -> bool:
    """Whether the call changes its first argument in place."""
    name = _raw_name(node)
    if isinstance(node.target, str | OpOverload) and name.endswith("_") and not name.endswith("__"):
        return True
    return name in ("setitem", "iadd", "isub", "imul", "itruediv", "ipow")


def is_random_call(node: fx.Node) -> bool:
    """Whether the call draws random numbers, or calls what may."""
    name = operator_name(node)
    return name in _RANDOM or name.startswith("rand") or is_higher_order(node.target)


def is_random_except_dropout(node: fx.Node) -> bool:
    """Whether the call draws random numbers, and is not dropout."""
    return is_random_call(node) and "dropout" not in operator_name(node)


def is_always_false(condition: fx.Node) -> bool:
    """Whether the condition is a random number from 0 to 1 below zero, as where LayerDrop is off."""
    match condition.args:
        case (fx.Node() as drawn, int() | float() as limit):
            is_uniform = operator_name(drawn) in ("rand", "rand_like")
            return is_uniform and operator_name(condition) == "lt" and limit <= 0
    return False


def _raw_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return schema(target).name.split("::")[1]
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of a function with a signature, defaults too; else those given by name."""
    if isinstance(node.target, OpOverload):
        given = {argument.name: argument.default_value for argument in schema(node.target).arguments}
        named = dict(zip(given, node.args, strict=False))
        return {**given, **named, **node.kwargs}
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return dict(node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def reduction_of(arguments: dict[str, Any]) -> str:
    """How a loss reduces: ``none``, ``mean``, ``sum`` or another word; "" if it is not said so."""
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        return ""
    reduction = arguments.get("reduction", "")
    return _REDUCTIONS.get(reduction, "") if isinstance(reduction, int) else str(reduction)


INHERITED_META = ("custom", "nn_module_stack", "partitioner_tag", "stack_trace")
"""What a node that is put in has of the meta of the node it belongs to."""


def fake_value(node: Any) -> Any:
    """The fake value of a node."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads, in the order of its arguments, and as often as they occur there."""
    found = list[fx.Node]()
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def insert_after(
    after: fx.Node, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> fx.Node:
    """A call of ``function`` right after a node."""
    with after.graph.inserting_after(after):
        node = after.graph.create_node("call_function", function, args, kwargs, name)
    node.meta = {key: after.meta[key] for key in INHERITED_META if key in after.meta}
    return node


@dataclass
class NodeInserter:
    """Inserts nodes one after the other."""

    last: fx.Node

    def __call__(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        self.last = insert_after(self.last, name, function, *args, **kwargs)
        return self.last

    def scale_by_batch_fraction(self, whole: fx.Node, like: fx.Node) -> fx.Node:
        """The microbatch's fraction of a value of the whole batch, in the dtype of ``like``."""
        share = self("share", torch.mul, whole, self("share", BATCH_FRACTION, fake_value(like).device))
        return self("share", torch.ops.aten._to_copy.default, share, dtype=fake_value(like).dtype)

    def repeat_call(self, node: fx.Node, **changed: Any) -> fx.Node:
        """The same call with other arguments."""
        arguments = {**named_arguments(node), **changed}
        return self(f"{node.name}_sum", node.target, *arguments.values())  # type: ignore[arg-type]
