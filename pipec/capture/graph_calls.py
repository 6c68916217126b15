"""Names, arguments and source lines of the calls in a captured graph, whichever front end made it."""

import inspect
from typing import Any

from torch import fx

from pipec.capture.diagnosis import innermost_model_line, traceback_lines
from pipec.torch_compat.operators import OpOverload, is_higher_order, schema

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


def describe_call(node: fx.Node) -> str:
    """``amax at model.py:12: x.amax(0)``"""
    line = innermost_model_line(traceback_lines(node.meta.get("stack_trace") or ""))
    return f"{operator_name(node)} at {line}" if line else operator_name(node)


def at_line(node: fx.Node) -> str:
    """The line of the model that made the node, on a line of its own; empty where torch lost it."""
    line = innermost_model_line(traceback_lines(node.meta.get("stack_trace") or ""))
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
