"""Sorting rows by integer keys and putting them back, as mixtures of experts do with tokens.

What is sorted has ``inner`` elements for each row. This is followed, under any names::

    keys, order = experts.sort()                           KEYS, ORDER
    x = tokens[order // 2]                                 ORDER, divided, and ROWS
    y = grouped_mm(x, weights, bincount(keys).cumsum(0))   COUNTS, ENDS, ROWS
    back[order] = arange(len(order))                       INVERSE
    z = y[back]                                            rows again, as ``PerRow``

Every sort has its own ``SortedRows.sort_id``: values in the order of one sort are never combined with values
in the order of another. In between, only elementwise arithmetic is followed.
"""

import itertools
from dataclasses import replace

from torch import Tensor

from pipec.capture.batch.dependence import (
    Dependence,
    MixedRows,
    PerRow,
    SortedContent,
    SortedRows,
    SumOverRows,
    Unproven,
    Whole,
)
from pipec.capture.batch.operator_call import OperatorCall, Rule
from pipec.capture.batch.pointwise import KEEPING

IN_ORDER = 0
"""The number of the order that rows have anyway."""

_OTHERWISE = "sorts rows, or computes with sorted ones, and nothing shows that they are put back"

_numbers = itertools.count(IN_ORDER + 1)


def sort_results(call: OperatorCall) -> tuple[Dependence, ...] | None:
    """The results of sorting integers in ascending order; None for any other sort."""
    keys, value = call.first, call.dependence_of(call.first)
    is_plain = isinstance(value, PerRow) and value == PerRow(0, 1, value.inner)
    if not is_plain or keys.ndim != 1 or keys.is_floating_point() or not call.symbolic:
        return None
    if call.name != "sort" or call.arguments.get("descending"):
        return None
    assert isinstance(value, PerRow)
    by = next(_numbers)
    return SortedRows(by, value.inner, SortedContent.KEYS), SortedRows(by, value.inner, SortedContent.ORDER)


def sorted_rule(call: OperatorCall) -> Dependence | tuple[Dependence, ...] | None:
    """The result of a call that reads a sort's results; None for elementwise and other calls."""
    if call.name in KEEPING and len(call.values) == 1:
        return call.values[0]
    match call.name:
        case "sort":
            return call.mixed(_OTHERWISE), _sorted_back(call)
        case "floor_divide" | "div":
            return _divided(call)
        case "histc" | "bincount":
            return _counts(call)
        case "cumsum" if call.first.ndim == 1:
            return _changed(call, SortedContent.COUNTS, SortedContent.ENDS)
        case "_grouped_mm" | "transformers::grouped_mm_fallback":
            return _by_group(call)
        case "index" | "_unsafe_index" | "index_select":
            return _looked_up(call)
        case "index_put" | "_unsafe_index_put" | "_index_put_impl":
            return _put(call)
        case "index_add":
            return _added(call)
    return None


def apply_in_sorted_order(call: OperatorCall, rule: Rule) -> Dependence | tuple[Dependence, ...]:
    """The result of a rule for rows, applied to sorted rows: each element is computed by itself."""
    sorts = {(v.sort_id, v.inner) for v in call.values if isinstance(v, SortedRows)}
    others = [
        v
        for v in call.values
        if not (isinstance(v, SortedRows) and v.content in (SortedContent.ROWS, SortedContent.KEYS))
    ]
    if len(sorts) > 1 or not all(isinstance(v, Whole) for v in others):
        return call.mixed("computes with sorted rows, and with what has another order")
    if "batch_norm" in call.name:
        return call.mixed("normalises sorted rows")
    ((by, inner),) = sorts
    rows = PerRow(0, 1, inner)

    def dependence_of(tensor: Tensor) -> Dependence:
        value = call.dependence_of(tensor)
        return rows if isinstance(value, SortedRows) else value

    def in_order(value: Dependence) -> Dependence:
        if value == rows:
            return SortedRows(by, inner, SortedContent.ROWS)
        return (
            value
            if isinstance(value, SumOverRows | Whole | MixedRows | Unproven)
            else call.mixed("moves sorted rows")
        )

    found = rule(replace(call, dependence_of=dependence_of))
    return tuple(map(in_order, found)) if isinstance(found, tuple) else in_order(found)


def _sorted_back(call: OperatorCall) -> Dependence:
    """``order.sort().indices``"""
    order = call.dependence_of(call.first)
    if (
        isinstance(order, SortedRows)
        and order == order.of(SortedContent.ORDER)
        and not call.arguments.get("descending")
    ):
        return order.of(SortedContent.INVERSE)
    return call.mixed(_OTHERWISE)


def _changed(call: OperatorCall, old: SortedContent, new: SortedContent) -> Dependence:
    value = call.dependence_of(call.first)
    if isinstance(value, SortedRows) and value.content is old and len(call.values) == 1:
        return value.of(new)
    return call.mixed(_OTHERWISE)


def _divided(call: OperatorCall) -> Dependence | None:
    """``order // 2``: the pair that each element belongs to, such as the two experts of a token."""
    value, divisors = call.values[0], [x for x in call.numbers if isinstance(x, int)]
    if not isinstance(value, SortedRows) or value.content is not SortedContent.ORDER:
        return None
    floors = call.name == "floor_divide" or call.arguments.get("rounding_mode") in ("floor", "trunc")
    if len(call.values) == 1 and floors and len(divisors) == 1 and divisors[0] > 0:
        divisor = value.divisor * divisors[0]
        if value.inner % divisor == 0:
            return replace(value, divisor=divisor)
    return call.mixed("computes with the places of sorted rows")


def _counts(call: OperatorCall) -> Dependence:
    """The counts of each key; no key may be below the lower limit of ``histc``.

    Without limits ``histc`` takes the smallest key of the microbatch for one.
    """
    has_limits = call.name == "bincount" or call.arguments.get("min") != call.arguments.get("max")
    counted = _changed(call, SortedContent.KEYS, SortedContent.COUNTS)
    return counted if has_limits else call.mixed(_OTHERWISE)


def _by_group(call: OperatorCall) -> Dependence:
    """Each row times the matrix of its group; cumulative counts of the keys are the group ends."""
    if len(call.values) != 3:
        return call.mixed(_OTHERWISE)
    x, weights, ends = call.values
    if not isinstance(x, SortedRows) or x.content is not SortedContent.ROWS or weights != Whole():
        return call.mixed(_OTHERWISE)
    return x if ends == x.of(SortedContent.ENDS) else call.mixed(_OTHERWISE)


def _index(call: OperatorCall) -> SortedRows | None:
    """The one index, along dimension 0; None if there are others, or if it is not of a sort."""
    if call.name in ("index_select", "index_add"):
        index = call["index"] if call["dim"] == 0 else None
    else:
        given = list(call["indices"])
        index = given[0] if given and all(x is None for x in given[1:]) else None
    value = call.dependence_of(index) if index is not None and index.ndim == 1 else None
    return value if isinstance(value, SortedRows) else None


def _looked_up(call: OperatorCall) -> Dependence | None:
    """``x[order]``, ``x[order // 2]``, ``table[keys]`` and ``y[back]``."""
    source, at = call.dependence_of(call["self"]), _index(call)
    if at is None:
        return call.mixed("looks up sorted rows by their places")
    rows = PerRow(0, 1, at.inner)
    if at.content is SortedContent.INVERSE:
        return rows if source == at.of(SortedContent.ROWS) else call.mixed("puts other rows back")
    is_own = at.content is SortedContent.ORDER and source == PerRow(0, 1, at.inner // at.divisor)
    is_table = at.content in (SortedContent.KEYS, SortedContent.ROWS) and source == Whole()
    if not is_own and not is_table:
        return call.mixed("looks up by sorted numbers")
    return rows if at.sort_id == IN_ORDER else at.of(SortedContent.ROWS)


def _put(call: OperatorCall) -> Dependence:
    """``back[order] = arange(len(order))``, or ``z[order] = y``, which overwrite every element."""
    at, value = _index(call), call.dependence_of(call["values"])
    if at is not None and at == at.of(SortedContent.ORDER) and not call.arguments.get("accumulate"):
        if value in (SortedRows(IN_ORDER, at.inner, SortedContent.ORDER), PerRow(0, is_row_number=True)):
            return at.of(SortedContent.INVERSE)
        if value == at.of(SortedContent.ROWS):
            return PerRow(0, 1, at.inner)
    return call.mixed("writes to the places of sorted rows")


def _added(call: OperatorCall) -> Dependence:
    """``index_add(0, order // 2, y)``, which adds each result to the element that it was made of."""
    at, source, target = _index(call), call.dependence_of(call["source"]), call.dependence_of(call["self"])
    if at is None or at.content is not SortedContent.ORDER or source != at.of(SortedContent.ROWS):
        return call.mixed("adds sorted rows to others")
    is_own = target == PerRow(0, 1, at.inner // at.divisor)
    return target if is_own else call.mixed("adds sorted rows to others")
