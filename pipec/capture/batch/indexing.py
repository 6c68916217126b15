"""Rules for lookups by index and for writes to indices."""

from dataclasses import replace

import torch
from torch import Tensor

from pipec.capture.batch.dependence import Dependence, PerRow, SelectedRows, SumOverRows, Whole, power_of
from pipec.capture.batch.operator_call import (
    NeedsRowNumbersError,
    OperatorCall,
    mixed_or_unproven,
    per_row_among,
)


def embedding(call: OperatorCall) -> Dependence:
    """``embedding``: a whole table, looked up by rows."""
    table, index = call.dependence_of(call["weight"]), call.dependence_of(call["indices"])
    if unknown := mixed_or_unproven([table, index]):
        return unknown
    call.require_no_row_numbers()
    if power_of(index) or (power_of(table) and isinstance(index, SelectedRows)):
        return call.unproven()
    if isinstance(table, Whole) and isinstance(index, PerRow | Whole):
        return replace(index, degree=table.degree)
    if isinstance(table, Whole) and isinstance(index, SelectedRows):
        return index
    return call.mixed("looks up in rows by numbers of other rows")


def index_select(call: OperatorCall) -> Dependence:
    source, index = call.dependence_of(call["self"]), call.dependence_of(call["index"])
    dim = call["dim"] % max(call["self"].ndim, 1)
    if unknown := mixed_or_unproven([source, index]):
        return unknown
    if power_of(index):
        return call.unproven()
    if isinstance(source, PerRow):
        if dim != source.dim and isinstance(index, Whole):
            return source
        if index == PerRow(0, is_row_number=True) and source == PerRow(dim):
            return source
        return call.mixed("looks up rows by numbers")
    if isinstance(index, PerRow):
        call.require_no_row_numbers()
        if not isinstance(source, Whole):
            return call.mixed("looks up in a sum over rows, by rows")
        return replace(index, dim=dim, degree=source.degree)
    if isinstance(index, Whole) and not isinstance(source, SelectedRows):
        return source
    return call.unproven()


def index(call: OperatorCall) -> Dependence:
    """``x[i, :, j]``: indices broadcast; their dimensions are placed at the first index, or in front."""
    x, given = call["self"], list(call["indices"])
    source = call.dependence_of(x)
    given += [None] * (x.ndim - sum(_width(i) for i in given))
    used = [i for i in given if i is not None]
    values = [call.dependence_of(i) for i in used]
    if unknown := mixed_or_unproven([source, *values]):
        return unknown
    if any(isinstance(v, SumOverRows) for v in values) or any(power_of(v) for v in values):
        return call.mixed("looks up by a sum over the rows of a microbatch")
    if any(i.dtype in (torch.bool, torch.uint8) for i in used):
        return _by_mask(call, source, given, values)
    width = max((i.ndim for i in used), default=0)
    places = [place for place, i in enumerate(given) if i is not None]
    front = places[0] if places and places[-1] - places[0] == len(places) - 1 else 0
    if isinstance(source, SumOverRows):
        return (
            source if all(isinstance(v, Whole) for v in values) else call.mixed("looks up in a sum, by rows")
        )
    if any(isinstance(v, SelectedRows) for v in (source, *values)):
        return _of_places(call, source, given, values)
    by_rows = {
        v.at(v.dim + width - i.ndim) for i, v in zip(used, values, strict=True) if isinstance(v, PerRow)
    }
    plain = {replace(v, is_row_number=False) for v in by_rows}
    if isinstance(source, PerRow):
        own = given[source.dim]
        if own is None:
            before = sum(i is None for i in given[: source.dim])
            moved = source.at(before if before < front or not places else before + width)
            return moved if not by_rows else call.mixed("looks up in each row by numbers of other rows")
        if source.is_row_number:
            raise NeedsRowNumbersError([x])
        number = call.dependence_of(own)
        aligned = (
            isinstance(number, PerRow) and number.is_row_number and (source.outer, source.inner) == (1, 1)
        )
        if not aligned or len(plain) != 1:
            return call.mixed("looks up rows by numbers")
        others = [v for v in by_rows if v.is_row_number]
        if len(others) != len(by_rows) or sum(isinstance(v, PerRow) and v.is_row_number for v in values) == 1:
            one = plain.pop()
            return replace(one, dim=one.dim + front, degree=source.degree)
        raise NeedsRowNumbersError(
            [i for i in used if i is not own and getattr(call.dependence_of(i), "is_row_number", False)]
        )
    if not by_rows:
        return Whole(source.degree if isinstance(source, Whole) else 0)
    call.require_no_row_numbers()
    if len(plain) > 1:
        return call.mixed("combines each row with other rows")
    one = plain.pop()
    return replace(one, dim=one.dim + front, degree=power_of(source))


def _width(index: Tensor | None) -> int:
    """How many dimensions an index replaces."""
    return index.ndim if index is not None and index.dtype in (torch.bool, torch.uint8) else 1


def _by_mask(
    call: OperatorCall, source: Dependence, given: list[Tensor | None], values: list[Dependence]
) -> Dependence:
    """``x[mask]``: its result has as many rows, or parts of rows, as the mask selects."""
    place = next(place for place, i in enumerate(given) if i is not None)
    (mask, *others), (value, *_) = [i for i in given if i is not None], values
    if others:
        return call.unproven()
    if isinstance(value, Whole):
        if isinstance(source, PerRow) and not place <= source.dim < place + mask.ndim:
            return source.at(source.dim - (mask.ndim - 1) * (source.dim > place))
        return call.mixed("chooses rows by their place") if isinstance(source, PerRow) else source
    if (
        isinstance(value, PerRow)
        and not value.is_row_number
        and isinstance(source, PerRow)
        and source.dim == value.dim + place
    ):
        return SelectedRows(source.is_row_number) if place == 0 and not source.degree else call.unproven()
    if isinstance(value, PerRow) and isinstance(source, Whole) and not source.degree and place == 0:
        return SelectedRows()
    return call.unproven()


def _of_places(
    call: OperatorCall, source: Dependence, given: list[Tensor | None], values: list[Dependence]
) -> Dependence:
    """``x[mask.nonzero()]``: the rows that values choose."""
    places = SelectedRows(are_indices=True)
    if isinstance(source, PerRow) and source == PerRow(0) and given[0] is not None and values[0] == places:
        return (
            SelectedRows()
            if all(v in (places, SelectedRows()) or isinstance(v, Whole) for v in values)
            else call.unproven()
        )
    if isinstance(source, Whole) and not source.degree and set(values) == {SelectedRows()}:
        return SelectedRows()
    if source == SelectedRows() and given[0] is None and all(isinstance(v, Whole) for v in values):
        return source
    return call.unproven()


def gather(call: OperatorCall) -> Dependence:
    """``gather`` along ``dim``; in other dimensions each element reads from its own position."""
    x, places = call["self"], call["index"]
    source, index = call.dependence_of(x), call.dependence_of(places)
    dim = call["dim"] % max(x.ndim, 1)
    if unknown := mixed_or_unproven([source, index]):
        return unknown
    if isinstance(source, PerRow) and source.dim == dim:
        return call.mixed("looks up rows by numbers")
    call.require_no_row_numbers()
    if (
        isinstance(source, SumOverRows | SelectedRows)
        or isinstance(index, SumOverRows | SelectedRows)
        or power_of(index)
    ):
        return call.unproven()
    if isinstance(source, PerRow) and isinstance(index, PerRow):
        same = (source.dim, source.outer, source.inner) == (index.dim, index.outer, index.inner)
        return source if same else call.unproven("looks up in rows by numbers that stand in another order")
    if isinstance(source, PerRow) or isinstance(index, PerRow):
        rows = source if isinstance(source, PerRow) else index
        assert isinstance(rows, PerRow)
        fits = dim == rows.dim or (isinstance(source, Whole) and source.fill is not None)
        fits = fits or (isinstance(index, Whole) and index.fill is not None)
        return replace(rows, degree=power_of(source)) if fits else call.unproven()
    return source


def scatter(call: OperatorCall) -> Dependence:
    """``scatter`` along ``dim``: within rows, or from rows into sums."""
    target, x = call.dependence_of(call["self"]), call["self"]
    dim = call["dim"] % max(x.ndim, 1)
    others = [call.dependence_of(t) for t in call.tensors[1:]]
    if unknown := mixed_or_unproven([target, *others]):
        return unknown
    if (
        isinstance(target, PerRow)
        and target.dim == dim
        and any(v.is_row_number for v in per_row_among(others))
    ):
        return call.mixed("writes to rows by their numbers")
    call.require_no_row_numbers()
    rows = per_row_among([target, *others])
    if isinstance(target, PerRow) and target.dim == dim == 0 and _puts_back(others):
        return target
    if any(isinstance(v, SumOverRows | SelectedRows) for v in (target, *others)) or any(
        v.degree for v in rows
    ):
        return call.unproven()
    adds = call.name in ("scatter_add", "index_add") or (
        call.name in ("scatter", "scatter_reduce") and call.arguments.get("reduce") in ("add", "sum")
    )
    if not rows:
        return Whole()
    if isinstance(target, Whole) and all(v.dim == (dim if call.name != "index_add" else v.dim) for v in rows):
        index_rows = call.dependence_of(call["index"])
        if adds and target.fill == 0 and isinstance(index_rows, PerRow) and _is_from_same_rows(call, dim):
            return SumOverRows()
    if isinstance(target, PerRow) and target.dim != dim and all(_is_beside(v, target) for v in rows):
        if call.name in ("index_add", "index_copy", "index_fill"):
            fits = isinstance(call.dependence_of(call["index"]), Whole)
            return target if fits else call.mixed("writes into each row what belongs to another one")
        plain = [v for v in others if isinstance(v, Whole)]
        whole = [t for t, v in zip(call.tensors[1:], others, strict=True) if v in plain]
        fits = all(t.ndim == 0 or t.shape[target.dim] in (1, x.shape[target.dim]) for t in whole)
        return target if (fits and len(plain) < len(others)) or not plain else call.unproven()
    return call.mixed("writes rows to places that are another row's")


def _puts_back(others: list[Dependence]) -> bool:
    """Whether selected rows are written back to where they come from."""
    places = SelectedRows(are_indices=True)
    return places in others and all(v in (places, SelectedRows()) for v in others)


def _is_beside(value: PerRow, target: PerRow) -> bool:
    return (value.dim, value.outer, value.inner) == (target.dim, target.outer, target.inner)


def _is_from_same_rows(call: OperatorCall, dim: int) -> bool:
    """Whether the rows of index and source are the same, along ``dim`` of the source."""
    index = call.dependence_of(call["index"])
    source = call.arguments.get("src", call.arguments.get("source"))
    if not isinstance(source, Tensor) or not isinstance(index, PerRow):
        return isinstance(index, PerRow) and not isinstance(source, Tensor)
    value = call.dependence_of(source)
    if isinstance(value, Whole):
        return value.fill is not None
    if call.name == "index_add":
        return isinstance(value, PerRow) and value == index.at(dim) and index.dim == 0
    return value == index


def index_put(call: OperatorCall) -> Dependence:
    """``x[i, j] = values``."""
    x, given = call["self"], list(call["indices"])
    target, new = call.dependence_of(x), call["values"]
    used = [i for i in given if i is not None]
    values = [call.dependence_of(i) for i in used]
    value = call.dependence_of(new)
    if unknown := mixed_or_unproven([target, value, *values]):
        return unknown
    if all(isinstance(v, Whole) for v in (target, value, *values)):
        return Whole()
    if (
        not isinstance(target, PerRow)
        or target.degree
        or target.is_row_number
        or isinstance(value, SumOverRows)
    ):
        return call.unproven()
    if target.dim == 0 and given[0] is not None and _puts_back([*values, value]) and len(used) == 1:
        return target
    masks = [i for i in used if i.dtype is torch.bool]
    if masks:
        mask = values[0]
        fits = len(used) == 1 and given[0] is not None and isinstance(mask, PerRow) and not mask.is_row_number
        has_no_places = new.ndim <= x.ndim - used[0].ndim
        is_same = isinstance(value, Whole) and (has_no_places or value.fill is not None)
        rows = isinstance(mask, PerRow) and (mask.dim, mask.outer, mask.inner) == (
            target.dim,
            target.outer,
            target.inner,
        )
        return target if fits and rows and (is_same or value == SelectedRows()) else call.unproven()
    padded = given + [None] * (x.ndim - len(given))
    own = padded[target.dim]
    width = max((i.ndim for i in used), default=0)
    if own is None:
        if all(isinstance(v, Whole) for v in values) and (
            new.ndim == 0 or (isinstance(value, Whole) and value.fill is not None)
        ):
            return target
        places = [place for place, i in enumerate(padded) if i is not None]
        front = places[0] if places[-1] - places[0] == len(places) - 1 else 0
        before = sum(i is None for i in padded[: target.dim])
        dim = before if before < front else before + width
        result = width + sum(i is None for i in padded)
        same = isinstance(value, PerRow) and value.at(value.dim + result - new.ndim) == target.at(dim)
        plain = isinstance(value, Whole) and (new.ndim < result - dim or new.shape[dim - result] == 1)
        return target if all(isinstance(v, Whole) for v in values) and (same or plain) else call.unproven()
    number = call.dependence_of(own)
    aligned = isinstance(number, PerRow) and number.is_row_number and target == PerRow(target.dim)
    beside = {
        replace(v.at(v.dim + width - i.ndim), is_row_number=False)
        for i, v in zip(used, values, strict=True)
        if isinstance(v, PerRow)
    }
    only = sum(isinstance(v, PerRow) and v.is_row_number for v in values) == 1
    if aligned and only and len(beside) == 1:
        at = next(iter(beside))
        if isinstance(value, Whole) and (new.ndim == 0 or value.fill is not None):
            return target
        places = [place for place, i in enumerate(padded) if i is not None]
        front = places[0] if places[-1] - places[0] == len(places) - 1 else 0
        result = width + sum(i is None for i in padded)
        if isinstance(value, PerRow) and value.at(value.dim + result - new.ndim) == at.at(at.dim + front):
            return target
    return call.mixed("writes to rows by their numbers")


def masked_select(call: OperatorCall) -> Dependence:
    """``masked_select``: the selected elements, in order."""
    rows = {replace(v, is_row_number=False) for v in call.values if isinstance(v, PerRow)}
    if unknown := mixed_or_unproven(call.values):
        return unknown
    call.require_no_row_numbers()
    is_plain = len(rows) == 1 and next(iter(rows)).dim == 0 and not next(iter(rows)).degree
    return (
        SelectedRows()
        if is_plain and len(per_row_among(call.values)) == len(call.values)
        else call.unproven()
    )


def nonzero(call: OperatorCall) -> Dependence:
    """``nonzero``: row numbers within the microbatch."""
    value = call.dependence_of(call.first)
    if isinstance(value, PerRow) and value.dim == 0 and not value.degree:
        return SelectedRows(are_indices=True)
    return value if mixed_or_unproven([value]) else call.unproven()


def masked_scatter(call: OperatorCall) -> Dependence:
    """``masked_scatter``: each microbatch checks that the mask takes all of its source."""
    target, mask = call.dependence_of(call["self"]), call.dependence_of(call["mask"])
    source = call.dependence_of(call["source"])
    if unknown := mixed_or_unproven([target, mask, source]):
        return unknown
    fits = (
        isinstance(target, PerRow)
        and not target.is_row_number
        and target.dim == 0
        and isinstance(mask, PerRow)
    )
    from_rows = isinstance(source, SelectedRows) or (isinstance(source, PerRow) and source.dim == 0)
    return target if fits and from_rows else call.unproven()
