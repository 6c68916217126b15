"""What a value that a microbatch computes is to the value that the whole mini-batch would compute.

The rules are about calls as a front end writes them, before differentiation. They know few operators: those
that reduce, and those that are linear. Any other keeps rows apart, or nothing is known of what it returns.
"""

import inspect
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import fx

from pipec.capture.diagnosis import lines_in, model_line
from pipec.torch_compat import HigherOrderOperator, OpOverload


class Part(Enum):
    """How the values of microbatches make that of the batch."""

    SAME = auto()
    """All are that of the batch: parameters, constants, and what is known of the whole batch."""
    ROWS = auto()
    """It is all their rows, along one dimension."""
    SUM = auto()
    """It is their sum."""
    PICKED = auto()
    """It is all of theirs, one after the other: rows that values choose, each of which depends on one row."""
    PLACES = auto()
    """They say which rows these are, of those of the microbatch."""
    MEAN = auto()
    """It is their mean, each weighted by its rows."""
    SIZE = auto()
    """A Python number, proportional to the rows."""
    OTHER = auto()
    """They do not tell."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What is known of a node. ``given``: it follows from the arguments of ``step`` alone.

    ``because`` is the node where it ceased to be known.
    """

    part: Part
    given: bool = False
    because: fx.Node | None = None


ADD = {"add", "iadd", "radd", "sub", "isub", "subtract"}
TERMS = ADD | {"cat", "stack"}
"""Operators whose operands must be of one kind: sums among means are made means."""

MULTIPLY = {"mul", "imul", "rmul", "multiply"}
DIVIDE = {"div", "truediv", "itruediv", "divide", "true_divide"}
ARITHMETIC = ADD | MULTIPLY | DIVIDE | {"pow", "ipow", "rsub", "rtruediv", "rdiv", "floordiv", "floor_divide"}

CONSTANTS = {"as_tensor", "full", "full_like", "new_full", "new_tensor", "scalar_tensor", "tensor"}

ZEROS = {"zeros", "zeros_like", "new_zeros"}

SHAPED = {
    *("empty_like", "full_like", "ones_like", "zeros_like"),
    *("new_empty", "new_full", "new_ones", "new_zeros"),
}
"""Operators that read the type of their first argument, and maybe its shape, but not its values."""

LINEAR = {
    *("alias", "bfloat16", "cat", "clone", "contiguous", "cpu", "cuda", "detach", "double"),
    *("expand", "flatten", "float", "getitem", "half", "lift_fresh", "lift_fresh_copy", "mean"),
    *("neg", "permute", "reshape", "select", "squeeze", "stack", "sum", "t", "to", "to_copy"),
    *("transpose", "type", "type_as", "unsqueeze", "view"),
}
"""Operators that commute with sums over microbatches, in those arguments that are tensors of one kind."""

REDUCING = {"amax", "amin", "logsumexp", "max", "mean", "min", "prod", "std", "sum", "var"}
"""Operators that take dimensions to reduce."""

MOVING = {
    *("cat", "concat", "concatenate", "einsum", "expand", "flatten", "getattr", "getitem", "hstack"),
    *("matmul", "movedim", "moveaxis", "permute", "repeat", "reshape", "rot90", "select", "squeeze", "stack"),
    *("swapaxes", "swapdims", "t", "tile", "transpose", "unbind", "unflatten", "unfold", "unsqueeze"),
    *("view", "vstack"),
}
"""What may put rows into another dimension."""

SUMS = {"sum", "count_nonzero", "dot", "vdot", "nansum", "histc", "bincount"}

ALONG = {
    *("argsort", "cummax", "cummin", "cumprod", "cumsum", "diff", "flip", "log_softmax"),
    *("logcumsumexp", "normalize", "roll", "softmax", "softmin", "sort", "topk", "unfold"),
}
"""Operators that let what stands along a dimension depend on one another."""

COUNTED = {"cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"}
"""Losses whose mean is over targets that are not ignored, each with the weight of its class."""

WEIGHTED = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
"""Losses whose mean is over the weights, if there are any."""

_RANDOM = {
    *("alpha_dropout", "bernoulli", "cauchy", "dropout", "dropout1d", "dropout2d"),
    *("dropout3d", "exponential", "feature_alpha_dropout", "geometric", "gumbel_softmax"),
    *("log_normal", "multinomial", "native_dropout", "normal", "poisson", "random", "rrelu", "uniform"),
}

_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def operator_name(node: fx.Node) -> str:
    """``cross_entropy``, ``truediv`` or ``add``, whichever front end wrote the call, in place or not."""
    return _raw_name(node).strip("_")


def place_of(node: fx.Node) -> str:
    """``amax at model.py:12: x.amax(0)``"""
    line = model_line(lines_in(node.meta.get("stack_trace") or ""))
    return f"{operator_name(node)} at {line}" if line else operator_name(node)


def where(node: fx.Node) -> str:
    """The line of the model that made the node, on a line of its own; empty where torch lost it."""
    line = model_line(lines_in(node.meta.get("stack_trace") or ""))
    return f"\n  at {line}" if line else ""


def changes_argument(node: fx.Node) -> bool:
    """Whether the call changes its first argument in place."""
    name = _raw_name(node)
    if isinstance(node.target, str | OpOverload) and name.endswith("_") and not name.endswith("__"):
        return True
    return name in ("setitem", "iadd", "isub", "imul", "itruediv", "ipow")


def is_drawn(node: fx.Node) -> bool:
    """Whether the call draws random numbers, or calls what may."""
    name = operator_name(node)
    return name in _RANDOM or name.startswith("rand") or isinstance(node.target, HigherOrderOperator)


def draws_by_chance(node: fx.Node) -> bool:
    """Whether the call draws random numbers, and not only to leave out some of what it is given."""
    return is_drawn(node) and "dropout" not in operator_name(node)


def is_never(condition: fx.Node) -> bool:
    """Whether the condition is that a number drawn from 0 to 1 is below zero, as where LayerDrop is off."""
    match condition.args:
        case (fx.Node() as drawn, int() | float() as limit):
            is_uniform = operator_name(drawn) in ("rand", "rand_like")
            return is_uniform and operator_name(condition) == "lt" and limit <= 0
    return False


def _raw_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return str(target._schema.name).split("::")[1]
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of a function with a signature, defaults too; else those given by name."""
    if isinstance(node.target, OpOverload):
        given = {argument.name: argument.default_value for argument in node.target._schema.arguments}
        named = dict(zip(given, node.args, strict=False))
        return {**given, **named, **node.kwargs}
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return dict(node.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def dimensions_of(node: fx.Node) -> list[int]:
    """The dimensions that a call of an operator in ``ALONG`` or ``REDUCING`` names."""
    arguments = named_arguments(node)
    position = 2 if operator_name(node) in ("roll", "topk") else 1
    by_position = node.args[position] if len(node.args) > position else ()
    dims = next((arguments[key] for key in ("dim", "dims") if key in arguments), by_position)
    listed = dims if isinstance(dims, list | tuple) else [dims]
    return [dim for dim in listed if isinstance(dim, int)]


def reduction_of(arguments: dict[str, Any]) -> str:
    """How a loss reduces: ``none``, ``mean``, ``sum`` or another word; "" if it is not said so."""
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        return ""
    reduction = arguments.get("reduction", "")
    return _REDUCTIONS.get(reduction, "") if isinstance(reduction, int) else str(reduction)


def part_of_sums(node: fx.Node, parts: list[Part], has_number: bool) -> Part:
    """What a call makes of its operands' parts, among which there is ``SUM`` or ``MEAN``.

    ``has_number``: one of its arguments is a number other than zero. An addition is ``SUM`` if all its terms
    are; else it is ``MEAN``, once the sums among them are means.
    """
    name, kinds = operator_name(node), set(parts)
    rest = [part for part in parts if part not in (Part.SUM, Part.MEAN)]
    one = next(part for part in parts if part in (Part.SUM, Part.MEAN))
    if kinds & {Part.ROWS, Part.PICKED, Part.PLACES, Part.OTHER}:
        return Part.OTHER
    if name in TERMS and Part.SIZE not in kinds:
        adds_number = has_number and name in ADD
        return Part.SUM if kinds == {Part.SUM} and not adds_number else Part.MEAN
    scales = len(rest) == len(parts) - 1
    if name in MULTIPLY and scales:
        grows = Part.SIZE in kinds
        return one if not grows else Part.SUM if one is Part.MEAN and len(rest) == 1 else Part.OTHER
    if name in DIVIDE and scales and parts[0] is one and "rounding_mode" not in node.kwargs:
        shrinks = Part.SIZE in kinds
        return one if not shrinks else Part.MEAN if one is Part.SUM else Part.OTHER
    if name in LINEAR and (kinds == {one} or kinds == {Part.MEAN, Part.SAME}):
        return one
    return Part.OTHER


def part_of_rows(node: fx.Node, arguments: dict[str, Any], size_in: bool) -> Part:
    """What a call makes of rows where it returns none. ``size_in``: it also reads how many there are."""
    name, reduction = operator_name(node), reduction_of(arguments)
    if size_in or (name in WEIGHTED and arguments.get("weight") is not None):
        return Part.OTHER
    if "reduction" in arguments:
        return {"mean": Part.MEAN, "batchmean": Part.MEAN, "sum": Part.SUM}.get(reduction, Part.OTHER)
    if name in SUMS:
        return Part.SUM
    return Part.MEAN if name == "mean" else Part.OTHER
