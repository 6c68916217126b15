"""Rules for lookups by index and for writes to indices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipec.capture.batch.dependence import (
    Dependence,
    PerRow,
    SelectedRows,
    SumOverRows,
    Whole,
    is_whole,
    power_of,
)
from pipec.capture.batch.operator_call import OperatorCall, per_row_among


@dataclass(frozen=True)
class _Indices:
    """``x[i, :, j]``: indices broadcast; their dimensions are placed at the first index, or in front.

    ``given`` has an index or None for each dimension of x; a mask stands for all of its dimensions. ``rows``
    are those of the indices, along dimensions of the result.
    """

    given: Sequence[Tensor | None]
    values: Sequence[Dependence]
    width: int
    front: int
    rows: frozenset[PerRow]

    @classmethod
    def of(cls, call: OperatorCall) -> "_Indices":
        given = list(call["indices"])
        given += [None] * (call["self"].ndim - sum(x.ndim if _is_mask(x) else 1 for x in given))
        places = [place for place, x in enumerate(given) if x is not None]
        used = [x for x in given if x is not None]
        values = [call.dependence_of(x) for x in used]
        width = max((x.ndim for x in used), default=0)
        front = places[0] if places and places[-1] - places[0] == len(places) - 1 else 0
        pairs = zip(used, values, strict=True)
        rows = {v.at(v.dim + width - x.ndim + front) for x, v in pairs if isinstance(v, PerRow)}
        return cls(given, values, width, front, frozenset(replace(v, is_row_number=False) for v in rows))

    def __iter__(self) -> Iterator[Tensor]:
        return (x for x in self.given if x is not None)

    def after(self, dim: int) -> int:
        """The dimension of the result that a dimension of x without an index becomes."""
        before = sum(x is None for x in self.given[:dim])
        return before if before < self.front or not self.values else before + self.width

    def fits(self, new: Tensor, value: Dependence, rows: PerRow) -> bool:
        """Whether a new value has the ``rows`` of the result, or is the same for all."""
        from_end = self.width + sum(x is None for x in self.given) - rows.dim
        if isinstance(value, Whole):
            return value.fill is not None or new.ndim < from_end or new.shape[-from_end] == 1
        return isinstance(value, PerRow) and value.at(value.dim - new.ndim) == rows.at(-from_end)

    def is_own_row(self, call: OperatorCall, rows: PerRow) -> bool:
        """Whether each row is looked up in itself: by row numbers, and other rows beside them."""
        own = self.given[rows.dim]
        value = call.dependence_of(own) if own is not None else None
        numbers = [v for v in self.values if isinstance(v, PerRow) and v.is_row_number]
        is_alone = numbers == [value] and len(self.rows) == 1 and not rows.is_row_number
        return is_alone and (rows.outer, rows.inner) == (1, 1)


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def index(call: OperatorCall) -> Dependence:
    """``x[i, :, j]``."""
    x, at = call["self"], _Indices.of(call)
    source = call.dependence_of(x)
    if any(isinstance(v, SumOverRows) or power_of(v) for v in at.values):
        return call.mixed("looks up by a sum over the rows of a microbatch")
    if any(map(_is_mask, at)):
        return _by_mask(call, source, at)
    if isinstance(source, SumOverRows):
        are_whole = all(isinstance(v, Whole) for v in at.values)
        return source if are_whole else call.mixed("looks up in a sum, by rows")
    if any(isinstance(v, SelectedRows) for v in (source, *at.values)):
        return _of_places(call, source, at)
    if isinstance(source, PerRow):
        own = at.given[source.dim]
        if own is None and at.rows:
            return call.mixed("looks up in each row by numbers of other rows")
        if own is None:
            return source.at(at.after(source.dim))
        if not at.is_own_row(call, source):
            return call.mixed("looks up rows by numbers")
    elif call.has_row_numbers:
        return call.with_row_numbers()
    if len(at.rows) > 1:
        return call.mixed("combines each row with other rows")
    return next((replace(rows, degree=power_of(source)) for rows in at.rows), Whole(power_of(source)))


def _by_mask(call: OperatorCall, source: Dependence, at: _Indices) -> Dependence:
    """``x[mask]``: its result has as many rows, or parts of rows, as the mask selects."""
    (mask, *others), (value, *_) = at, at.values
    place = next(place for place, x in enumerate(at.given) if x is not None)
    if others:
        return call.unproven()
    if isinstance(value, Whole) and isinstance(source, PerRow):
        if place <= source.dim < place + mask.ndim:
            return call.mixed("chooses rows by their place")
        return source.at(source.dim - (mask.ndim - 1) * (source.dim > place))
    if isinstance(value, Whole):
        return source
    if not isinstance(value, PerRow) or value.is_row_number or place:
        return call.unproven()
    if isinstance(source, PerRow) and source.dim == value.dim and not source.degree:
        return SelectedRows(source.is_row_number)
    return SelectedRows() if is_whole(source) else call.unproven()


def _of_places(call: OperatorCall, source: Dependence, at: _Indices) -> Dependence:
    """``x[mask.nonzero()]``: the rows that values choose."""
    places = SelectedRows(are_indices=True)
    by_place = source == PerRow(0) and at.given[0] is not None and at.values[0] == places
    if by_place and all(v in (places, SelectedRows()) or isinstance(v, Whole) for v in at.values):
        return SelectedRows()
    if is_whole(source) and set(at.values) == {SelectedRows()}:
        return SelectedRows()
    if source == SelectedRows() and at.given[0] is None and all(isinstance(v, Whole) for v in at.values):
        return source
    return call.unproven()


def gather(call: OperatorCall) -> Dependence:
    """``gather`` along ``dim``; in other dimensions each element reads from its own position."""
    x, places = call["self"], call["index"]
    source, index = call.dependence_of(x), call.dependence_of(places)
    dim = call["dim"] % max(x.ndim, 1)
    if isinstance(source, PerRow) and source.dim == dim:
        return call.mixed("looks up rows by numbers")
    if source == index == SelectedRows() and dim:
        return source
    if power_of(index) or any(isinstance(v, SumOverRows | SelectedRows) for v in (source, index)):
        return call.unproven()
    rows = {(v.dim, v.outer, v.inner) for v in (source, index) if isinstance(v, PerRow)}
    fills = [v.fill is not None for v in (source, index) if isinstance(v, Whole)]
    if not rows:
        return source
    one = source if isinstance(source, PerRow) else index
    if isinstance(one, PerRow) and len(rows) == 1 and (all(fills) or one.dim == dim):
        return replace(one, degree=power_of(source))
    if len({dim for dim, *_ in rows}) > 1:
        return call.mixed("looks up in each row by numbers of other rows")
    return call.unproven("looks up in rows by numbers that stand in another order")


def scatter(call: OperatorCall) -> Dependence:
    """``scatter`` along ``dim``: within rows, or from rows into sums."""
    target, index = call.dependence_of(call["self"]), call.dependence_of(call["index"])
    dim = call["dim"] % max(call["self"].ndim, 1)
    others = [call.dependence_of(t) for t in call.tensors[1:]]
    rows = per_row_among([target, *others])
    if any(isinstance(v, SumOverRows | SelectedRows) for v in (target, *others)) or any(map(power_of, rows)):
        return call.unproven()
    is_beside = len({(v.dim, v.outer, v.inner) for v in rows}) == 1
    if isinstance(target, Whole) and target.fill == 0 and is_beside and rows[0] == index == rows[0].at(dim):
        adds = call.name == "scatter_add" or call.arguments.get("reduce") in ("add", "sum")
        fits = all(isinstance(v, PerRow) or (isinstance(v, Whole) and v.fill is not None) for v in others)
        if adds and fits:
            return SumOverRows()
    if isinstance(target, PerRow) and target.dim != dim and is_beside:
        return target if len(rows) > 1 else call.unproven()
    return call.mixed("writes rows to places that are another row's")


def index_put(call: OperatorCall) -> Dependence:
    """``x[i, j] = values``."""
    new, at = call["values"], _Indices.of(call)
    target, value = call.dependence_of(call["self"]), call.dependence_of(new)
    has_mask = any(map(_is_mask, at))
    if isinstance(target, Whole) and target.fill == 0 and call.arguments.get("accumulate") and not has_mask:
        if call.has_row_numbers:
            return call.with_row_numbers()
        is_plain = len(at.rows) == 1 and not any(map(power_of, at.values))
        return SumOverRows() if is_plain and at.fits(new, value, *at.rows) else call.unproven()
    if not isinstance(target, PerRow) or target.degree or target.is_row_number:
        return call.unproven()
    if has_mask:
        return target if _fits_mask(call, target, at) else call.unproven()
    if any(isinstance(v, SelectedRows) for v in (value, *at.values)):
        return call.unproven("writes to rows that values choose")
    own = at.given[target.dim]
    if own is not None and not at.is_own_row(call, target):
        return call.mixed("writes to rows by their numbers")
    rows = next(iter(at.rows)) if own is not None else target.at(at.after(target.dim))
    return target if at.fits(new, value, rows) and (own is not None or not at.rows) else call.unproven()


def _fits_mask(call: OperatorCall, target: PerRow, at: _Indices) -> bool:
    """Whether ``x[mask] = values`` writes to each row what belongs to it, or to all rows the same."""
    (mask, *_), new = at, call["values"]
    rows, value = call.dependence_of(mask), call.dependence_of(new)
    if at.given[0] is None or len(at.values) > 1 or rows != target:
        return False
    is_same = isinstance(value, Whole) and (
        new.ndim <= call["self"].ndim - mask.ndim or value.fill is not None
    )
    return is_same or value == SelectedRows()


def masked_select(call: OperatorCall) -> Dependence:
    """``masked_select``: the selected elements, in order."""
    one = call.values[0]
    fits = isinstance(one, PerRow) and not (one.dim or one.degree) and set(call.values) == {one}
    return SelectedRows() if fits else call.unproven()


def nonzero(call: OperatorCall) -> Dependence:
    """``nonzero``: row numbers within the microbatch."""
    value = call.dependence_of(call.first)
    if isinstance(value, PerRow) and value.dim == 0 and not value.degree:
        return SelectedRows(are_indices=True)
    return call.unproven()


def masked_scatter(call: OperatorCall) -> Dependence:
    """``masked_scatter``: each microbatch checks that the mask takes all of its source."""
    target, mask = call.dependence_of(call["self"]), call.dependence_of(call["mask"])
    source = call.dependence_of(call["source"])
    from_rows = isinstance(source, SelectedRows) or (isinstance(source, PerRow) and source.dim == 0)
    fits = isinstance(target, PerRow) and target.dim == 0 and isinstance(mask, PerRow) and from_rows
    return target if fits else call.unproven()
