"""Whether a condition that is the same for every microbatch is the same for the batch, too.

An unsplit model evaluates a condition once, over all rows; stages evaluate it for each microbatch. If every
microbatch finds ``(x > 2).any()`` true, or every one false, so does the batch; ``x.std() > 2`` may be false
for each microbatch and true for the batch. These rules tell the two apart. Unknown operators count as the
latter.
"""

from collections.abc import Callable
from enum import Enum, auto

import torch
from torch import fx

from pipec.capture.batch.dependence import MEAN, Dependence, PerRow, is_whole
from pipec.capture.graph_calls import at_line, fake_value, operator_name
from pipec.capture.markers import BATCH_COUNT
from pipec.errors import CaptureError


class ConditionReduction(Enum):
    """What the values of microbatches tell of that of the batch."""

    SAME = auto()
    """All are that of the batch."""
    TRUTH = auto()
    """A truth value: if all microbatches have the same, so has the batch."""
    COUNT = auto()
    """How many are true: it is zero for the batch if it is zero for all microbatches."""
    NUMBER = auto()
    """The batch's is between the smallest and the largest, such as a mean or an extreme."""


DependenceOf = Callable[[fx.Node], Dependence]

_KEEPING = {
    *("clone", "contiguous", "detach", "double", "float", "item", "long", "reshape", "squeeze", "view"),
}
_NOT = {"invert", "logical_not", "bitwise_not", "not"}
_JOINING = {"or", "bitwise_or", "logical_or", "and", "bitwise_and", "logical_and"}
_ORDERED = {"gt", "lt", "ge", "le"}
_EXTREMES = {"amax", "amin", "max", "min"}


def refuse_ambiguous_branch(assumed: fx.Node, dependence_of: DependenceOf, rows: int | None) -> None:
    """Raise CaptureError for a branch that the batch might not take though every microbatch does.

    ``rows`` are those of a microbatch if the graph is for these alone: nothing tells what else equals them,
    and a run compares the branches of microbatches with those of the batch.
    """
    condition = assumed.all_input_nodes[0]
    if rows is not None and (number := _number_of_rows(condition, rows)) is not None:
        why = (
            f"compares what the whole mini-batch has with the number {number}, which may come from the "
            f"{rows} rows of a microbatch:\nthis model is compiled for that many alone. Compare a share, "
            "such as the mean,"
        )
    elif rows is None and not is_batch_condition(condition, dependence_of):
        why = (
            "asks for a value that microbatches do not tell: all could go one way there, and the whole "
            "mini-batch the other.\nAsk for any(), all(), or compare the maximum, the minimum or the mean of "
            "what each row has by itself,\n"
        )
    else:
        return
    raise CaptureError(
        f"the model cannot be captured as one graph{at_line(assumed)}\n  A branch {why} or choose with "
        "torch.where."
    )


def _number_of_rows(condition: fx.Node, rows: int) -> int | None:
    """A multiple of ``rows`` that a condition on a count of the batch reads; None if there is none."""
    reached, pending, numbers = set[fx.Node](), [condition], list[int]()
    while pending:
        node = pending.pop()
        reached.add(node)
        numbers += [x for x in node.args if type(x) is int and x and x % rows == 0]
        pending += [] if node.target is BATCH_COUNT else {*node.all_input_nodes} - reached
    return next(iter(numbers), None) if any(node.target is BATCH_COUNT for node in reached) else None


def is_batch_condition(condition: fx.Node, dependence_of: DependenceOf) -> bool:
    """Whether the condition is that of the batch where it is the same for all of its microbatches."""
    return _reduction(condition, dependence_of) not in (None, ConditionReduction.NUMBER)


def _reduction(node: fx.Node, dependence_of: DependenceOf) -> ConditionReduction | None:
    """How a value of one element follows from those of microbatches; None if unknown."""
    value, name = dependence_of(node), operator_name(node)
    if is_whole(value):
        return ConditionReduction.SAME
    if value == MEAN or isinstance(value, PerRow):
        return ConditionReduction.NUMBER if value == MEAN else None
    operands = [x for x in node.args if isinstance(x, fx.Node)]
    if len(operands) == 1 and isinstance(dependence_of(operands[0]), PerRow):
        return _of_rows(name, fake_value(operands[0]).dtype is torch.bool)
    kinds = [_reduction(operand, dependence_of) for operand in operands]
    reduced = [kind for kind in kinds if kind is not ConditionReduction.SAME]
    if len(reduced) != 1 or reduced[0] is None:
        return None
    kind, is_number, is_alone = reduced[0], reduced[0] is ConditionReduction.NUMBER, len(node.args) == 1
    if name in _KEEPING:
        return kind
    with_zero = node.args[1:] == (0,)
    is_truth = (
        (name in _ORDERED and is_number)
        or (name in _NOT and is_alone and not is_number)
        or (name in _JOINING and kind is ConditionReduction.TRUTH)
        or (name == "eq" and with_zero and not is_number)
        or (name in ("ne", "gt") and with_zero and kind is ConditionReduction.COUNT)
    )
    return ConditionReduction.TRUTH if is_truth else None


def _of_rows(name: str, are_truths: bool) -> ConditionReduction | None:
    """How a call reduces rows to one element."""
    if name in ("any", "all") or (name in _EXTREMES and are_truths):
        return ConditionReduction.TRUTH
    if name == "count_nonzero" or (name == "sum" and are_truths):
        return ConditionReduction.COUNT
    return ConditionReduction.NUMBER if name in _EXTREMES else None
