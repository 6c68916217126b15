"""Whether a condition that is the same for every microbatch is the same for the batch, too.

An unsplit model evaluates a condition once, over all rows; stages evaluate it for each microbatch. If every
microbatch finds ``(x > 2).any()`` true, or every one false, so does the batch; ``x.std() > 2`` may be false
for each microbatch and true for the batch. These rules tell the two apart. Unknown operators count as the
latter.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, fx

from pipec.capture.batch.dependence import MEAN, Dependence, PerRow, is_whole
from pipec.capture.graph_calls import at_line, operator_name
from pipec.capture.markers import BATCH_COUNT
from pipec.errors import CaptureError


class ConditionReduction(Enum):
    """How the one-element values of microbatches make that of the batch."""

    SAME = auto()
    """All are that of the batch."""
    ANY = auto()
    """It is true if one of them is."""
    ALL = auto()
    """It is true if all of them are."""
    ONE = auto()
    """It is one of them, such as the largest."""
    BETWEEN = auto()
    """It is a number between them."""
    EITHER = auto()
    """It is their truth value, if they have the same."""


DependenceOf = Callable[[fx.Node], Dependence]

_KEEPING = {
    *("clone", "contiguous", "detach", "double", "float", "item", "long", "reshape", "squeeze", "view"),
}
_NOT = {"invert", "logical_not", "bitwise_not", "not"}
_NEGATED = {
    ConditionReduction.ANY: ConditionReduction.ALL,
    ConditionReduction.ALL: ConditionReduction.ANY,
    ConditionReduction.ONE: ConditionReduction.EITHER,
    ConditionReduction.EITHER: ConditionReduction.EITHER,
}
_REDUCED = {
    **{"any": ConditionReduction.ANY, "all": ConditionReduction.ALL},
    **dict.fromkeys(("amax", "amin", "max", "min"), ConditionReduction.ONE),
}
_ORDERED = {"gt", "lt", "ge", "le"}
_EQUAL = {"eq", "ne"}
_ABOVE_ZERO = {"gt", "ne"}
_KINDS = {"isfinite", "isinf", "isnan"}
_OF_ONE = {"all", "any", "count_nonzero", "sum"}
"""Operators that keep the truth of what has one element, if it is a truth value or a count."""

_BOOLEAN = {ConditionReduction.ANY, ConditionReduction.ALL, ConditionReduction.EITHER}
"""What is a truth value, or a count of those that are true."""

_JOINED = {
    **dict.fromkeys(("or", "bitwise_or", "logical_or"), ConditionReduction.ANY),
    **dict.fromkeys(("and", "bitwise_and", "logical_and"), ConditionReduction.ALL),
}


def refuse_ambiguous_branch(assumed: fx.Node, dependence_of: DependenceOf, rows: int | None) -> None:
    """Raise CaptureError for a branch that the batch might not take though every microbatch does.

    ``rows`` are those of a microbatch if the graph is for these alone: nothing tells what else equals them,
    and a run compares the branches of microbatches with those of the batch.
    """
    condition = assumed.all_input_nodes[0]
    if rows is not None and (number := _number_of_rows(condition, rows)) is not None:
        raise CaptureError(
            f"the model cannot be captured as one graph{at_line(assumed)}\n"
            f"  A branch compares what the whole mini-batch has with the number {number}, which may come "
            f"from the {rows} rows of a microbatch:\nthis model is compiled for that many alone. Compare a "
            "share, such as the mean, or choose with torch.where."
        )
    if rows is None and not is_batch_condition(condition, dependence_of):
        raise CaptureError(
            f"the model cannot be captured as one graph{at_line(assumed)}\n"
            "  A branch asks for a value that microbatches do not tell: all could go one way there, and the "
            "whole mini-batch the other.\nAsk for any(), all(), the maximum, the minimum or the mean of what "
            "each row has by itself, or\nchoose with torch.where."
        )


def _number_of_rows(condition: fx.Node, rows: int) -> int | None:
    """A multiple of ``rows`` that enters the condition; None if there is none."""
    reached, pending, numbers = set[fx.Node](), [condition], list[int]()
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            numbers += [x for x in node.args if type(x) is int and x and x % rows == 0]
            pending += [] if node.target is BATCH_COUNT else node.all_input_nodes
    return next(iter(numbers), None) if any(node.target is BATCH_COUNT for node in reached) else None


def is_batch_condition(condition: fx.Node, dependence_of: DependenceOf) -> bool:
    """Whether the condition is that of the batch where it is the same for all of its microbatches."""
    return _truth(condition, dependence_of) not in (None, ConditionReduction.BETWEEN)


def _truth(node: fx.Node, dependence_of: DependenceOf) -> ConditionReduction | None:
    """How a value of one element is reduced over microbatches; None if unknown."""
    if is_whole(dependence_of(node)):
        return ConditionReduction.SAME
    value = dependence_of(node)
    if value == MEAN or isinstance(value, PerRow):
        return ConditionReduction.BETWEEN if value == MEAN and _is_real(node) else None
    operands = [x for x in node.args if isinstance(x, fx.Node)]
    if len(operands) == 1 and isinstance(dependence_of(operands[0]), PerRow):
        return _of_rows(operator_name(node), operands[0])
    known = {_truth(operand, dependence_of) for operand in operands}
    truth = next(iter(known - {ConditionReduction.SAME}), None)
    if truth is None or not known <= {truth, ConditionReduction.SAME}:
        return None
    is_beside_same = ConditionReduction.SAME in known | _of_numbers(node) and len(operands) <= 2
    return _made_of(node, truth, operands, is_beside_same)


def _of_rows(name: str, rows: fx.Node) -> ConditionReduction | None:
    """How a call reduces rows to one element. The number of true elements counts as ``ANY``."""
    if name == "count_nonzero" or (name == "sum" and _dtype(rows) is torch.bool):
        return ConditionReduction.ANY
    return _REDUCED.get(name)


def _made_of(
    node: fx.Node, truth: ConditionReduction, operands: list[fx.Node], is_beside_same: bool
) -> ConditionReduction | None:
    """How a call combines operands whose reduction is known with operands that are the same for all."""
    name = operator_name(node)
    if len(operands) == 1 and (name in _KEEPING or (name in _OF_ONE and truth in _BOOLEAN)):
        return truth if name in _KEEPING or _has_one(operands[0]) else None
    if name in _NOT or (name == "eq" and truth in _BOOLEAN and _is_with_zero(node)):
        return _NEGATED.get(truth)
    if name in _ABOVE_ZERO and truth in _BOOLEAN:
        return truth if _is_with_zero(node) else None
    if name in _JOINED:
        return truth if truth is _JOINED[name] else None
    if name in _KINDS and truth is ConditionReduction.ONE:
        return ConditionReduction.EITHER
    if is_beside_same and (name in _ORDERED or (name in _EQUAL and truth is ConditionReduction.ONE)):
        return (
            ConditionReduction.EITHER
            if truth in (ConditionReduction.ONE, ConditionReduction.BETWEEN)
            else None
        )
    return None


def _is_with_zero(comparison: fx.Node) -> bool:
    return (
        len(comparison.args) == 2 and isinstance(comparison.args[1], int | float) and comparison.args[1] == 0
    )


def _has_one(node: fx.Node) -> bool:
    value = _value(node)
    return isinstance(value, Tensor) and value.ndim == 0


def _is_real(node: fx.Node) -> bool:
    dtype = _dtype(node)
    return dtype is not None and dtype.is_floating_point


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = _value(node)
    return value.dtype if isinstance(value, Tensor) else None


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _of_numbers(node: fx.Node) -> set[ConditionReduction]:
    """The reductions of operands that are Python numbers."""
    return {ConditionReduction.SAME for x in node.args if isinstance(x, int | float)}
