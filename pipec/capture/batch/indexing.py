"""What becomes of rows where places choose elements: lookups, and writes to places."""

from dataclasses import replace

import torch
from torch import Tensor

from pipec.capture.batch.call import NeedsNumbersError, OperatorCall, rows_among, unknown_among
from pipec.capture.batch.values import Picked, Rows, Sum, Value, Whole, power_of


def embedding(call: OperatorCall) -> Value:
    """A table that is whole, looked up by rows."""
    table, index = call.value_of(call["weight"]), call.value_of(call["indices"])
    if unknown := unknown_among([table, index]):
        return unknown
    call.require_no_numbers()
    if power_of(index) or (power_of(table) and isinstance(index, Picked)):
        return call.unproven()
    if isinstance(table, Whole) and isinstance(index, Rows | Whole):
        return replace(index, degree=table.degree)
    if isinstance(table, Whole) and isinstance(index, Picked):
        return index
    return call.mixed("looks up in rows by numbers of other rows")


def index_select(call: OperatorCall) -> Value:
    source, index = call.value_of(call["self"]), call.value_of(call["index"])
    dim = call["dim"] % max(call["self"].ndim, 1)
    if unknown := unknown_among([source, index]):
        return unknown
    if power_of(index):
        return call.unproven()
    if isinstance(source, Rows):
        if dim != source.dim and isinstance(index, Whole):
            return source
        if index == Rows(0, numbers=True) and source == Rows(dim):
            return source
        return call.mixed("looks up rows by numbers")
    if isinstance(index, Rows):
        call.require_no_numbers()
        if not isinstance(source, Whole):
            return call.mixed("looks up in a sum over rows, by rows")
        return replace(index, dim=dim, degree=source.degree)
    if isinstance(index, Whole) and not isinstance(source, Picked):
        return source
    return call.unproven()


def index(call: OperatorCall) -> Value:
    """``x[i, :, j]``: indices broadcast, and their dimensions stand at the first, or in front."""
    x, given = call["self"], list(call["indices"])
    source = call.value_of(x)
    given += [None] * (x.ndim - sum(_width(i) for i in given))
    used = [i for i in given if i is not None]
    values = [call.value_of(i) for i in used]
    if unknown := unknown_among([source, *values]):
        return unknown
    if any(isinstance(v, Sum) for v in values) or any(power_of(v) for v in values):
        return call.mixed("looks up by a sum over the rows of a microbatch")
    if any(i.dtype in (torch.bool, torch.uint8) for i in used):
        return _by_mask(call, source, given, values)
    width = max((i.ndim for i in used), default=0)
    places = [place for place, i in enumerate(given) if i is not None]
    front = places[0] if places and places[-1] - places[0] == len(places) - 1 else 0
    if isinstance(source, Sum):
        return (
            source if all(isinstance(v, Whole) for v in values) else call.mixed("looks up in a sum, by rows")
        )
    if any(isinstance(v, Picked) for v in (source, *values)):
        return _of_places(call, source, given, values)
    by_rows = {v.at(v.dim + width - i.ndim) for i, v in zip(used, values, strict=True) if isinstance(v, Rows)}
    plain = {replace(v, numbers=False) for v in by_rows}
    if isinstance(source, Rows):
        own = given[source.dim]
        if own is None:
            before = sum(i is None for i in given[: source.dim])
            moved = source.at(before if before < front or not places else before + width)
            return moved if not by_rows else call.mixed("looks up in each row by numbers of other rows")
        if source.numbers:
            raise NeedsNumbersError([x])
        number = call.value_of(own)
        aligned = isinstance(number, Rows) and number.numbers and (source.outer, source.inner) == (1, 1)
        if not aligned or len(plain) != 1:
            return call.mixed("looks up rows by numbers")
        others = [v for v in by_rows if v.numbers]
        if len(others) != len(by_rows) or sum(isinstance(v, Rows) and v.numbers for v in values) == 1:
            one = plain.pop()
            return replace(one, dim=one.dim + front, degree=source.degree)
        raise NeedsNumbersError(
            [i for i in used if i is not own and getattr(call.value_of(i), "numbers", False)]
        )
    if not by_rows:
        return Whole(source.degree if isinstance(source, Whole) else 0)
    call.require_no_numbers()
    if len(plain) > 1:
        return call.mixed("combines each row with other rows")
    one = plain.pop()
    return replace(one, dim=one.dim + front, degree=power_of(source))


def _width(index: Tensor | None) -> int:
    """How many dimensions an index takes the place of."""
    return index.ndim if index is not None and index.dtype in (torch.bool, torch.uint8) else 1


def _by_mask(call: OperatorCall, source: Value, given: list[Tensor | None], values: list[Value]) -> Value:
    """``x[mask]``, whose result has rows, or parts of them, as many as the mask says."""
    place = next(place for place, i in enumerate(given) if i is not None)
    (mask, *others), (value, *_) = [i for i in given if i is not None], values
    if others:
        return call.unproven()
    if isinstance(value, Whole):
        if isinstance(source, Rows) and not place <= source.dim < place + mask.ndim:
            return source.at(source.dim - (mask.ndim - 1) * (source.dim > place))
        return call.mixed("chooses rows by their place") if isinstance(source, Rows) else source
    if (
        isinstance(value, Rows)
        and not value.numbers
        and isinstance(source, Rows)
        and source.dim == value.dim + place
    ):
        return Picked(source.numbers) if place == 0 and not source.degree else call.unproven()
    if isinstance(value, Rows) and isinstance(source, Whole) and not source.degree and place == 0:
        return Picked()
    return call.unproven()


def _of_places(call: OperatorCall, source: Value, given: list[Tensor | None], values: list[Value]) -> Value:
    """``x[mask.nonzero()]``: rows that values choose."""
    places = Picked(places=True)
    if isinstance(source, Rows) and source == Rows(0) and given[0] is not None and values[0] == places:
        return (
            Picked()
            if all(v in (places, Picked()) or isinstance(v, Whole) for v in values)
            else call.unproven()
        )
    if isinstance(source, Whole) and not source.degree and set(values) == {Picked()}:
        return Picked()
    if source == Picked() and given[0] is None and all(isinstance(v, Whole) for v in values):
        return source
    return call.unproven()


def gather(call: OperatorCall) -> Value:
    """Along ``dim``; in the other dimensions each element reads from its own place."""
    x, places = call["self"], call["index"]
    source, index = call.value_of(x), call.value_of(places)
    dim = call["dim"] % max(x.ndim, 1)
    if unknown := unknown_among([source, index]):
        return unknown
    if isinstance(source, Rows) and source.dim == dim:
        return call.mixed("looks up rows by numbers")
    call.require_no_numbers()
    if isinstance(source, Sum | Picked) or isinstance(index, Sum | Picked) or power_of(index):
        return call.unproven()
    if isinstance(source, Rows) and isinstance(index, Rows):
        same = (source.dim, source.outer, source.inner) == (index.dim, index.outer, index.inner)
        return source if same else call.unproven("looks up in rows by numbers that stand in another order")
    if isinstance(source, Rows) or isinstance(index, Rows):
        rows = source if isinstance(source, Rows) else index
        assert isinstance(rows, Rows)
        fits = dim == rows.dim or (isinstance(source, Whole) and source.fill is not None)
        fits = fits or (isinstance(index, Whole) and index.fill is not None)
        return replace(rows, degree=power_of(source)) if fits else call.unproven()
    return source


def scattered(call: OperatorCall) -> Value:
    """Writes to places along ``dim``: within rows, or from rows into sums."""
    target, x = call.value_of(call["self"]), call["self"]
    dim = call["dim"] % max(x.ndim, 1)
    others = [call.value_of(t) for t in call.tensors[1:]]
    if unknown := unknown_among([target, *others]):
        return unknown
    if isinstance(target, Rows) and target.dim == dim and any(v.numbers for v in rows_among(others)):
        return call.mixed("writes to rows by their numbers")
    call.require_no_numbers()
    rows = rows_among([target, *others])
    if isinstance(target, Rows) and target.dim == dim == 0 and _puts_back(others):
        return target
    if any(isinstance(v, Sum | Picked) for v in (target, *others)) or any(v.degree for v in rows):
        return call.unproven()
    adds = call.name in ("scatter_add", "index_add") or (
        call.name in ("scatter", "scatter_reduce") and call.arguments.get("reduce") in ("add", "sum")
    )
    if not rows:
        return Whole()
    if isinstance(target, Whole) and all(v.dim == (dim if call.name != "index_add" else v.dim) for v in rows):
        index_rows = call.value_of(call["index"])
        if adds and target.fill == 0 and isinstance(index_rows, Rows) and _is_from_same_rows(call, dim):
            return Sum()
    if isinstance(target, Rows) and target.dim != dim and all(_is_beside(v, target) for v in rows):
        if call.name in ("index_add", "index_copy", "index_fill"):
            fits = isinstance(call.value_of(call["index"]), Whole)
            return target if fits else call.mixed("writes into each row what belongs to another one")
        plain = [v for v in others if isinstance(v, Whole)]
        whole = [t for t, v in zip(call.tensors[1:], others, strict=True) if v in plain]
        fits = all(t.ndim == 0 or t.shape[target.dim] in (1, x.shape[target.dim]) for t in whole)
        return target if (fits and len(plain) < len(others)) or not plain else call.unproven()
    return call.mixed("writes rows to places that are another row's")


def _puts_back(others: list[Value]) -> bool:
    """Whether rows that values choose are written to where they come from."""
    places = Picked(places=True)
    return places in others and all(v in (places, Picked()) for v in others)


def _is_beside(value: Rows, target: Rows) -> bool:
    return (value.dim, value.outer, value.inner) == (target.dim, target.outer, target.inner)


def _is_from_same_rows(call: OperatorCall, dim: int) -> bool:
    """Whether the rows of index and source are the same, along ``dim`` of the source."""
    index = call.value_of(call["index"])
    source = call.arguments.get("src", call.arguments.get("source"))
    if not isinstance(source, Tensor) or not isinstance(index, Rows):
        return isinstance(index, Rows) and not isinstance(source, Tensor)
    value = call.value_of(source)
    if isinstance(value, Whole):
        return value.fill is not None
    if call.name == "index_add":
        return isinstance(value, Rows) and value == index.at(dim) and index.dim == 0
    return value == index


def index_put(call: OperatorCall) -> Value:
    """``x[i, j] = values``."""
    x, given = call["self"], list(call["indices"])
    target, new = call.value_of(x), call["values"]
    used = [i for i in given if i is not None]
    values = [call.value_of(i) for i in used]
    value = call.value_of(new)
    if unknown := unknown_among([target, value, *values]):
        return unknown
    if all(isinstance(v, Whole) for v in (target, value, *values)):
        return Whole()
    if not isinstance(target, Rows) or target.degree or target.numbers or isinstance(value, Sum):
        return call.unproven()
    if target.dim == 0 and given[0] is not None and _puts_back([*values, value]) and len(used) == 1:
        return target
    masks = [i for i in used if i.dtype is torch.bool]
    if masks:
        mask = values[0]
        fits = len(used) == 1 and given[0] is not None and isinstance(mask, Rows) and not mask.numbers
        has_no_places = new.ndim <= x.ndim - used[0].ndim
        is_same = isinstance(value, Whole) and (has_no_places or value.fill is not None)
        rows = isinstance(mask, Rows) and (mask.dim, mask.outer, mask.inner) == (
            target.dim,
            target.outer,
            target.inner,
        )
        return target if fits and rows and (is_same or value == Picked()) else call.unproven()
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
        same = isinstance(value, Rows) and value.at(value.dim + result - new.ndim) == target.at(dim)
        plain = isinstance(value, Whole) and (new.ndim < result - dim or new.shape[dim - result] == 1)
        return target if all(isinstance(v, Whole) for v in values) and (same or plain) else call.unproven()
    number = call.value_of(own)
    aligned = isinstance(number, Rows) and number.numbers and target == Rows(target.dim)
    beside = {
        replace(v.at(v.dim + width - i.ndim), numbers=False)
        for i, v in zip(used, values, strict=True)
        if isinstance(v, Rows)
    }
    only = sum(isinstance(v, Rows) and v.numbers for v in values) == 1
    if aligned and only and len(beside) == 1:
        at = next(iter(beside))
        if isinstance(value, Whole) and (new.ndim == 0 or value.fill is not None):
            return target
        places = [place for place, i in enumerate(padded) if i is not None]
        front = places[0] if places[-1] - places[0] == len(places) - 1 else 0
        result = width + sum(i is None for i in padded)
        if isinstance(value, Rows) and value.at(value.dim + result - new.ndim) == at.at(at.dim + front):
            return target
    return call.mixed("writes to rows by their numbers")


def picked(call: OperatorCall) -> Value:
    """``masked_select``: what the mask chooses, in order."""
    rows = {replace(v, numbers=False) for v in call.values if isinstance(v, Rows)}
    if unknown := unknown_among(call.values):
        return unknown
    call.require_no_numbers()
    is_plain = len(rows) == 1 and next(iter(rows)).dim == 0 and not next(iter(rows)).degree
    return Picked() if is_plain and len(rows_among(call.values)) == len(call.values) else call.unproven()


def places(call: OperatorCall) -> Value:
    """``nonzero``: the numbers of rows that count are those of the microbatch."""
    value = call.value_of(call.first)
    if isinstance(value, Rows) and value.dim == 0 and not value.degree:
        return Picked(places=True)
    return value if unknown_among([value]) else call.unproven()


def masked_scatter(call: OperatorCall) -> Value:
    """Each microbatch checks that the mask chooses all of the source, which then belongs to its own rows."""
    target, mask = call.value_of(call["self"]), call.value_of(call["mask"])
    source = call.value_of(call["source"])
    if unknown := unknown_among([target, mask, source]):
        return unknown
    fits = isinstance(target, Rows) and not target.numbers and target.dim == 0 and isinstance(mask, Rows)
    from_rows = isinstance(source, Picked) or (isinstance(source, Rows) and source.dim == 0)
    return target if fits and from_rows else call.unproven()
