"""Rows that are brought into the order of whole numbers and back, as mixtures of experts do with tokens.

What is sorted has ``inner`` elements for each row. This is followed, under any names::

    keys, order = experts.sort()                           KEYS, ORDER
    x = tokens[order // 2]                                 ORDER, divided, and ROWS
    y = grouped_mm(x, weights, bincount(keys).cumsum(0))   COUNTS, ENDS, ROWS
    back[order] = arange(len(order))                       INVERSE
    z = y[back]                                            rows again, as ``Rows``

Every sort has a number of its own, ``Sorted.by``: what is in the order of one does not meet another. Only
arithmetic that computes each element by itself is done in between.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from pipec.capture.batch.call import OperatorCall
from pipec.capture.batch.pointwise import KEEPING
from pipec.capture.batch.values import Holds, Mixed, Rows, Sorted, Sum, Unproven, Value, Whole

IN_ORDER = 0
"""The number of the order that rows have anyway."""

_OTHERWISE = "sorts rows, or computes with sorted ones, and nothing shows that they are put back"

_numbers = itertools.count(IN_ORDER + 1)


def sorted_by(call: OperatorCall) -> tuple[Value, ...] | None:
    """The results of sorting whole numbers in ascending order; None if it is not known what that does."""
    keys, value = call.first, call.value_of(call.first)
    is_plain = isinstance(value, Rows) and value == Rows(0, 1, value.inner)
    if not is_plain or keys.ndim != 1 or keys.is_floating_point() or not call.symbolic:
        return None
    if call.name != "sort" or call.arguments.get("descending"):
        return None
    assert isinstance(value, Rows)
    by = next(_numbers)
    return Sorted(by, value.inner, Holds.KEYS), Sorted(by, value.inner, Holds.ORDER)


def of_sorted(call: OperatorCall) -> Value | tuple[Value, ...] | None:
    """What a call makes of the results of a sort, besides arithmetic with rows; None for all other calls."""
    if call.name in KEEPING and len(call.values) == 1:
        return call.values[0]
    match call.name:
        case "sort":
            order = call.value_of(call.first)
            is_order = isinstance(order, Sorted) and order.holds is Holds.ORDER
            back = replace(order, holds=Holds.INVERSE) if is_order else call.mixed(_OTHERWISE)
            return call.mixed(_OTHERWISE), back if not call.arguments.get("descending") else call.mixed(
                _OTHERWISE
            )
        case "floor_divide" | "div":
            return _divided(call)
        case "histc" | "bincount":
            return _counts(call)
        case "cumsum":
            return _changed(call, call.first, Holds.COUNTS, Holds.ENDS)
        case "_grouped_mm" | "transformers::grouped_mm_fallback":
            return _by_group(call)
        case "index" | "_unsafe_index" | "index_select":
            return _looked_up(call)
        case "index_put" | "_unsafe_index_put" | "_index_put_impl":
            return _put(call)
        case "index_add":
            return _added(call)
    return None


def by_place(
    call: OperatorCall, rule: Callable[[OperatorCall], Value | tuple[Value, ...]]
) -> Value | tuple[Value, ...]:
    """What a rule for rows makes of sorted ones: each element is computed by itself, wherever it is."""
    sorts = {(v.by, v.inner) for v in call.values if isinstance(v, Sorted)}
    holds = {v.holds for v in call.values if isinstance(v, Sorted)}
    others = [v for v in call.values if not isinstance(v, Sorted)]
    if (
        len(sorts) > 1
        or not holds <= {Holds.ROWS, Holds.KEYS}
        or not all(isinstance(v, Whole) for v in others)
    ):
        return call.mixed("computes with sorted rows, and with what has another order")
    if "batch_norm" in call.name:
        return call.mixed("normalises sorted rows")
    ((by, inner),) = sorts
    rows = Rows(0, 1, inner)

    def value_of(tensor: Tensor) -> Value:
        value = call.value_of(tensor)
        return rows if isinstance(value, Sorted) else value

    def in_order(value: Value) -> Value:
        if value == rows:
            return Sorted(by, inner, Holds.ROWS)
        return value if isinstance(value, Sum | Whole | Mixed | Unproven) else call.mixed("moves sorted rows")

    found = rule(replace(call, value_of=value_of))
    return tuple(map(in_order, found)) if isinstance(found, tuple) else in_order(found)


def _changed(call: OperatorCall, tensor: Tensor, old: Holds, new: Holds) -> Value:
    value = call.value_of(tensor)
    fits = isinstance(value, Sorted) and value.holds is old and len(call.values) == 1
    return replace(value, holds=new) if fits else call.mixed(_OTHERWISE)  # type: ignore[type-var]


def _divided(call: OperatorCall) -> Value | None:
    """``order // 2``: which pair of elements each belongs to, such as the two choices of a token."""
    value, divisors = call.values[0], [x for x in call.numbers if isinstance(x, int)]
    if not isinstance(value, Sorted) or value.holds is not Holds.ORDER:
        return None
    floors = call.name == "floor_divide" or call.arguments.get("rounding_mode") == "floor"
    if len(call.values) == 1 and floors and len(divisors) == 1 and divisors[0] > 0:
        divisor = value.divisor * divisors[0]
        if value.inner % divisor == 0:
            return replace(value, divisor=divisor)
    return call.mixed("computes with the places of sorted rows")


def _counts(call: OperatorCall) -> Value:
    """How many elements have each key. Without limits of its own ``histc`` takes the smallest key for one."""
    has_limits = call.name == "bincount" or call.arguments.get("min") != call.arguments.get("max")
    counted = _changed(call, call.first, Holds.KEYS, Holds.COUNTS)
    return counted if has_limits else call.mixed(_OTHERWISE)


def _by_group(call: OperatorCall) -> Value:
    """Each row times the matrix of its group; the groups end where the counts of the keys say."""
    if len(call.values) != 3:
        return call.mixed(_OTHERWISE)
    x, weights, ends = call.values
    fits = isinstance(x, Sorted) and x.holds is Holds.ROWS and weights == Whole()
    return x if fits and ends == replace(x, holds=Holds.ENDS) else call.mixed(_OTHERWISE)  # type: ignore[type-var]


def _index(call: OperatorCall) -> tuple[Tensor | None, Value]:
    """The one index, along dimension 0, and what it is; None if there are others."""
    if call.name in ("index_select", "index_add"):
        index = call["index"] if call["dim"] == 0 else None
    else:
        given = list(call["indices"])
        index = given[0] if given and all(x is None for x in given[1:]) else None
    return (index, call.value_of(index)) if index is not None and index.ndim == 1 else (None, Whole())


def _looked_up(call: OperatorCall) -> Value | None:
    """``x[order]``, ``x[order // inner]``, ``table[keys]`` and ``y[back]``."""
    source, (index, at) = call.value_of(call["self"]), _index(call)
    if index is None or not isinstance(at, Sorted):
        return call.mixed("looks up by sorted numbers")
    rows = Rows(0, 1, at.inner)
    if at.holds is Holds.INVERSE:
        return rows if source == replace(at, holds=Holds.ROWS) else call.mixed("puts other rows back")
    is_own = at.holds is Holds.ORDER and source == Rows(0, 1, at.inner // at.divisor)
    is_table = at.holds in (Holds.KEYS, Holds.ROWS) and source == Whole()
    if not is_own and not is_table:
        return call.mixed("looks up by sorted numbers")
    return rows if at.by == IN_ORDER else Sorted(at.by, at.inner, Holds.ROWS)


def _put(call: OperatorCall) -> Value:
    """``back[order] = arange(len(order))``, or ``z[order] = y``, which overwrite all that was there."""
    (index, at), value = _index(call), call.value_of(call["values"])
    is_order = index is not None and isinstance(at, Sorted) and at == Sorted(at.by, at.inner, Holds.ORDER)
    if not is_order or call.arguments.get("accumulate"):
        return call.mixed("writes to the places of sorted rows")
    assert isinstance(at, Sorted)
    if value in (Sorted(IN_ORDER, at.inner, Holds.ORDER), Rows(0, numbers=True)):
        return replace(at, holds=Holds.INVERSE)
    is_own = value == replace(at, holds=Holds.ROWS)
    return Rows(0, 1, at.inner) if is_own else call.mixed("writes to the places of sorted rows")


def _added(call: OperatorCall) -> Value:
    """``index_add(0, order // 2, y)`` adds to each element what was made of it."""
    (_, at), source, target = _index(call), call.value_of(call["source"]), call.value_of(call["self"])
    is_order = isinstance(at, Sorted) and at.holds is Holds.ORDER
    is_own = is_order and source == Sorted(at.by, at.inner, Holds.ROWS)
    fits = is_own and target == Rows(0, 1, at.inner // at.divisor)
    return target if fits else call.mixed("adds sorted rows to others")
