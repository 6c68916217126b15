"""Rules for operators that move elements: views, slices, concatenation, creation."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from pipec.capture.batch.dependence import (
    MEAN,
    Dependence,
    PerRow,
    SelectedRows,
    SumOverRows,
    Whole,
    power_of,
)
from pipec.capture.batch.operator_call import NeedsMeanError, OperatorCall, mixed_or_unproven, tensors_in


def move(call: OperatorCall) -> Dependence:
    """Sums and whole values keep their dependence; rows are looked up in ``_PLACES``."""
    value = call.dependence_of(call.first)
    if isinstance(value, Whole) and call.name in _CUTTING and any(map(call.is_row_multiple, _integers(call))):
        why = "takes as many elements as the microbatch has rows"
        return call.mixed(why) if call.symbolic else call.unproven(why.replace("takes", "may take"))
    if str(call.op).endswith(".dtype"):
        return _reinterpreted(call, value)
    if call.name in ("select_scatter", "slice_scatter") and not isinstance(value, PerRow):
        return _written_to_whole(call, value, call.dependence_of(call["src"]))
    if not isinstance(value, PerRow | SelectedRows) or (
        isinstance(value, SelectedRows) and _keeps_first(call)
    ):
        return value
    if isinstance(value, SelectedRows) and call.name in ("view", "_unsafe_view") and not value.are_indices:
        sizes = sorted((call.first.shape[0], call.shape[0])) if call.shape[:1] else [0]
        fits = bool(sizes[0]) and sizes[1] % sizes[0] == 0  # groups that do not fit a microbatch fail
        return value if fits else call.unproven("moves rows that values choose")
    if isinstance(value, SelectedRows):
        return call.unproven("moves rows that values choose")
    return _PLACES[call.name](call, value)


_CUTTING = {"select", "slice", "split", "split_with_sizes", "unfold"}


def _integers(call: OperatorCall) -> list[int]:
    return [number for number in call.numbers if isinstance(number, int) and number < sys.maxsize]


def reshaped(shape: Sequence[int], rows: PerRow, to: Sequence[int], batch: int) -> PerRow | None:
    """The rows of a tensor of ``shape`` in the shape ``to``, its elements in the same order.

    An element's row is (place // stride) % batch, before and after.
    """
    stride = rows.inner * math.prod(shape[rows.dim + 1 :])
    for dim, size in enumerate(to):
        behind = math.prod(to[dim + 1 :])
        if size % batch == 0 and size and stride % behind == 0 and (behind * size) % (stride * batch) == 0:
            inner = stride // behind
            return replace(rows, dim=dim, outer=size // (batch * inner), inner=inner)
    return None


def _reinterpreted(call: OperatorCall, value: Dependence) -> Dependence:
    """``x.view(torch.int32)``: the bits of each element as another type."""
    call.require_no_row_numbers()
    if isinstance(value, SumOverRows) or power_of(value):
        return call.mixed("reads the bits of what is computed of all rows of a microbatch")
    if isinstance(value, PerRow) and value.dim == call.first.ndim - 1 and call.shape != call.first.shape:
        return call.unproven("gives rows another number of elements")
    return replace(value, fill=None) if isinstance(value, Whole) else value


def _keeps_first(call: OperatorCall) -> bool:
    """Whether dimension 0, of selected rows, stays first and unchanged."""
    return call.first.shape[:1] == call.shape[:1]


def _dim(call: OperatorCall, name: str = "dim") -> int:
    ndim = call.first.ndim
    return int(call[name]) % ndim if ndim else 0


def _view(call: OperatorCall, rows: PerRow) -> Dependence:
    found = reshaped(call.first.shape, rows, call.shape, call.rows)
    return found or call.mixed("gives rows another shape, in which they no longer stand one behind the other")


def _permute(call: OperatorCall, rows: PerRow) -> Dependence:
    dims = [dim % call.first.ndim for dim in call["dims"]]
    return rows.at(dims.index(rows.dim))


def _transpose(call: OperatorCall, rows: PerRow) -> Dependence:
    if call.name == "t":
        return rows.at(call.first.ndim - 1 - rows.dim)
    one, other = (call[name] % call.first.ndim for name in ("dim0", "dim1"))
    return rows.at({one: other, other: one}.get(rows.dim, rows.dim))


def _unsqueeze(call: OperatorCall, rows: PerRow) -> Dependence:
    dim = call["dim"] % (call.first.ndim + 1)
    return rows.at(rows.dim + (dim <= rows.dim))


def _squeeze(call: OperatorCall, rows: PerRow) -> Dependence:
    given = call.arguments.get("dim")
    dims = range(call.first.ndim) if given is None else [given] if isinstance(given, int) else given
    gone = {dim % call.first.ndim for dim in dims if call.first.shape[dim] == 1}
    if rows.dim in gone:
        return call.unproven("drops the dimension of the rows, if that has one row")
    return rows.at(rows.dim - sum(dim < rows.dim for dim in gone))


def _expand(call: OperatorCall, rows: PerRow) -> Dependence:
    return rows.at(rows.dim + len(call.shape) - call.first.ndim)


def _select(call: OperatorCall, rows: PerRow) -> Dependence:
    dim = _dim(call)
    if dim == rows.dim:
        return call.mixed("takes one row of the microbatch")
    return rows.at(rows.dim - (dim < rows.dim))


def _slice(call: OperatorCall, rows: PerRow) -> Dependence:
    dim, size = _dim(call), call.first.shape[_dim(call)]
    if dim != rows.dim:
        return rows
    start, end, step = call["start"] or 0, call["end"], call["step"]
    start = start + size if start < 0 else min(start, size)
    end = size if end is None else end + size if end < 0 else min(end, size)
    every = call.rows * rows.inner
    if step != 1 or start % every or (end - start) % every or end <= start:
        return call.mixed("takes some rows of the microbatch by their place")
    if not call.symbolic and (start or call["end"] not in (None, sys.maxsize)):
        return call.unproven("takes rows by their place, and this model is captured for one number of rows")
    return replace(rows, outer=(end - start) // every)


def _split(call: OperatorCall, rows: PerRow) -> Dependence:
    if _dim(call) != rows.dim:
        return rows
    every = call.rows * rows.inner
    if any(part.shape[rows.dim] % every or not part.shape[rows.dim] for part in call.result):
        return call.mixed("takes some rows of the microbatch by their place")
    sizes = {part.shape[rows.dim] for part in call.result}
    if len(sizes) > 1 or not call.symbolic:
        return call.unproven()
    return replace(rows, outer=sizes.pop() // every)


def _unfold(call: OperatorCall, rows: PerRow) -> Dependence:
    if call["dimension"] % call.first.ndim == rows.dim:
        return call.mixed("takes windows over rows")
    return rows


def _diagonal(call: OperatorCall, rows: PerRow) -> Dependence:
    dims = {call[name] % call.first.ndim for name in ("dim1", "dim2")}
    if rows.dim in dims:
        return call.mixed("takes the diagonal over rows")
    return rows.at(rows.dim - sum(dim < rows.dim for dim in dims))


def _diag(call: OperatorCall, rows: PerRow) -> Dependence:
    return call.mixed("takes the diagonal over rows, or makes one of them")


def _flip(call: OperatorCall, rows: PerRow) -> Dependence:
    dims = call["dims"] if call["dims"] or call.name == "flip" else range(call.first.ndim)
    if rows.dim in {dim % call.first.ndim for dim in dims}:
        return call.mixed("changes the order of rows")
    return rows


def _as_strided(call: OperatorCall, rows: PerRow) -> Dependence:
    """Windows within rows: a step along the rows' dimension is longer than all other steps together."""
    sizes, strides = call["size"], call["stride"]
    every = call.first.stride(rows.dim)
    found = [
        dim for dim, (n, s) in enumerate(zip(sizes, strides, strict=True)) if n == call.rows and s == every
    ]
    others = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) - (call.rows - 1) * every
    is_plain = (
        rows == PerRow(rows.dim, is_row_number=rows.is_row_number)
        and call.first.is_contiguous()
        and rows.dim == 0
    )
    if len(found) == 1 and is_plain and others < every and not call["storage_offset"]:
        return rows.at(found[0])
    return call.mixed("steps from one row to another") if is_plain else call.unproven()


def _written(call: OperatorCall, rows: PerRow) -> Dependence:
    """The result of writing into a position of each row: the written value must be per row, or whole."""
    dim, part = _dim(call), call.dependence_of(call["src"])
    shift = call.name == "select_scatter" and dim < rows.dim
    is_fill = isinstance(part, Whole) and (part.fill == 0 or (part.fill is not None and not rows.degree))
    own = is_fill and not rows.is_row_number
    if dim == rows.dim or not (own or part == rows.at(rows.dim - shift)):
        return call.mixed("writes to some rows by their place")
    return rows


def _written_to_whole(call: OperatorCall, value: Dependence, part: Dependence) -> Dependence:
    """The result of replacing a part of a whole value."""
    if isinstance(value, Whole) and isinstance(part, Whole) and value.degree == part.degree:
        return Whole(value.degree)
    return mixed_or_unproven([value, part]) or (value if value == part else call.unproven())


def _put_back(call: OperatorCall, rows: PerRow) -> Dependence:
    """The gradient of a slice, padded with zeros."""
    dim = call["dim"] % len(call.shape)
    found = rows.at(rows.dim + (call.name == "select_backward" and dim <= rows.dim))
    if call.name == "slice_backward" and call.first.shape[dim] == call.shape[dim] and call["step"] == 1:
        return found  # all of it
    return found if dim != found.dim else call.mixed("takes some rows of the microbatch by their place")


def _same(call: OperatorCall, rows: PerRow) -> Dependence:
    return rows


_PLACES = {
    **dict.fromkeys(("view_as_complex", "view_as_real"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "_view_copy"), _view),
    **dict.fromkeys(("transpose", "t"), _transpose),
    **dict.fromkeys(("select_scatter", "slice_scatter"), _written),
    **dict.fromkeys(("select_backward", "slice_backward"), _put_back),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), _split),
    **dict.fromkeys(("flip", "roll"), _flip),
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "select": _select,
    "unbind": _select,
    "slice": _slice,
    "unfold": _unfold,
    "diagonal": _diagonal,
    "diag": _diag,
    "as_strided": _as_strided,
}


def expand(call: OperatorCall) -> Dependence:
    """``expand``: as ``move``; a whole value has rows once it is expanded to the length of the batch."""
    value, first = call.dependence_of(call.first), call.first
    shift = len(call.shape) - first.ndim
    if isinstance(value, Whole) and call.symbolic:
        made = [
            dim
            for dim, size in enumerate(call.shape)
            if call.is_row_multiple(size)
            and (dim < shift or not call.is_row_multiple(first.shape[dim - shift]))
        ]
        if len(made) == 1:
            return PerRow(made[0], call.shape[made[0]] // call.rows, degree=value.degree)
    return move(call)


def repeat(call: OperatorCall) -> Dependence:
    """``x.repeat(2, 1)``: all rows follow once more after the rows."""
    value, first = call.dependence_of(call.first), call.first
    shift = len(call.shape) - first.ndim
    sizes = [1] * shift + list(first.shape)
    if isinstance(value, PerRow):
        dim = value.dim + shift
        return replace(value, dim=dim, outer=value.outer * call["repeats"][dim])
    tagged = [dim for dim, n in enumerate(call["repeats"]) if call.is_row_multiple(n)]
    if isinstance(value, Whole) and len(tagged) == 1:
        dim = tagged[0]
        return PerRow(dim, call["repeats"][dim] // call.rows, sizes[dim], value.degree)
    return value


def concatenate(call: OperatorCall) -> Dependence:
    """``cat`` and ``stack``."""
    parts = [x for x in call.tensors if x.numel() or x.ndim > 1 or call.name == "stack"]
    values = [call.dependence_of(x) for x in parts]
    if unknown := mixed_or_unproven(values):
        return unknown
    rows = [value for value in values if isinstance(value, PerRow)]
    if any(isinstance(value, SelectedRows) for value in values):
        keeps = call.name == "cat" and call["dim"] % len(call.shape) != 0
        return SelectedRows() if keeps and set(values) == {SelectedRows()} else call.unproven()
    if rows and any(isinstance(value, SumOverRows) for value in values):
        return call.mixed("joins rows with what is computed of all rows of a microbatch")
    if rows:
        return _joined_rows(call, parts, values, rows)
    sums = {value.degree for value in values if isinstance(value, SumOverRows)}
    wholes = {value.degree for value in values if isinstance(value, Whole)}
    if not sums:
        return Whole(wholes.pop()) if len(wholes) == 1 else call.mixed("joins different powers of the rows")
    if wholes - {0} or (wholes and sums - {0, -1}):
        return call.mixed("joins different powers of the number of rows")
    if len(sums) == 1 and (not wholes or sums == {MEAN.degree}):
        return SumOverRows(sums.pop())
    raise NeedsMeanError([x for x, value in zip(parts, values, strict=True) if value == SumOverRows()])


def _joined_rows(
    call: OperatorCall, parts: Sequence[Tensor], values: Sequence[Dependence], rows: Sequence[PerRow]
) -> Dependence:
    dim = call["dim"] % len(call.shape)
    first, is_stack = rows[0], call.name == "stack"
    if len({(x.dim, x.inner, x.degree, x.is_row_number) for x in rows}) > 1:
        return call.mixed("joins each row with other rows")
    if is_stack or dim != first.dim:
        fills = [x.fill if isinstance(x, Whole) else None for x in values if not isinstance(x, PerRow)]
        fits = None not in fills and (not first.degree or not any(fills))
        if len({x.outer for x in rows}) > 1 or not fits:
            return call.unproven("joins rows with what has no rows")
        return first.at(first.dim + (is_stack and dim <= first.dim))
    if len(rows) < len(values):
        return call.mixed("puts something before or behind the rows of a microbatch")
    return replace(first, outer=sum(x.outer for x in rows))


def pad(call: OperatorCall) -> Dependence:
    """``constant_pad_nd``: ``pad`` has two numbers for each dimension, from the last on."""
    value, pad, number = call.dependence_of(call.first), call["pad"], call["value"]
    call.require_no_row_numbers()
    if isinstance(value, PerRow | SelectedRows):
        own = call.first.ndim - 1 - (value.dim if isinstance(value, PerRow) else 0)
        if any(pad[2 * own : 2 * own + 2]):
            return call.mixed("puts something before or behind the rows of a microbatch")
    if any(call.degree(each) for each in (*pad, number)) or (number and power_of(value) and value != MEAN):
        return call.mixed("computes with the number of rows, which is another one in a microbatch")
    if number and value == SumOverRows():
        return call.mixed("adds what is no sum over rows")
    return replace(value, fill=None) if isinstance(value, Whole) and value.fill != number else value


def create(call: OperatorCall) -> Dependence:
    """``zeros``, ``ones``, ``full``: rows, if a dimension is as long as the batch."""
    results = tensors_in(call.result)
    tagged = [dim for dim, size in enumerate(call.shape) if call.is_row_multiple(size)]
    degree = call.degree(call.arguments.get("fill_value", 0)) if call.name in _FILLED else 0
    if degree is None or len(results) != 1:
        return call.unproven()
    source = call.dependence_of(call.first) if call.tensors and not call.symbolic else None
    if isinstance(source, PerRow) and call.shape == call.first.shape:
        return replace(source, degree=degree, is_row_number=False)
    if call.symbolic and len(tagged) == 1:
        return PerRow(tagged[0], call.shape[tagged[0]] // call.rows, degree=degree)
    if call.symbolic and tagged:
        return call.mixed("makes something for every pair of rows")
    return Whole(degree, None if degree or call.name in _DRAWN else _fill(call))


_FILLED = {"full", "full_like", "new_full", "scalar_tensor", "fill"}
_DRAWN = {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal"}


def _fill(call: OperatorCall) -> float | None:
    if call.name in _FILLED:
        number = call.arguments.get("fill_value", call.arguments.get("s", call.arguments.get("value")))
        return float(number) if isinstance(number, int | float) else None
    if "zeros" in call.name or call.name == "zero":
        return 0.0
    return 1.0 if "ones" in call.name else None


def arange(call: OperatorCall) -> Dependence:
    """``arange(rows)`` are the numbers of a microbatch's rows, ``arange(3 * rows)`` those of their parts."""
    if not any(call.is_row_multiple(size) for size in call.shape):
        fixed = call.symbolic or call.degree(call.shape[0] if call.shape else 0) == 0
        return Whole() if fixed else call.unproven("may number the rows of the microbatch")
    if not call.symbolic:
        return call.unproven("may number the rows of the microbatch")
    given = (call.arguments.get("start") or 0, call["end"], call.arguments.get("step") or 1)
    if given == (0, call.rows, 1):
        return PerRow(0, is_row_number=True)
    if given[0] == 0 and given[2] == 1 and call.is_row_multiple(given[1]):
        return call.unproven("numbers parts of the rows of a microbatch")
    return call.mixed("numbers the rows of a microbatch, from another one on than the first")


def as_view_of(base: Tensor, view: Tensor, rows: PerRow, batch: int) -> int | None:
    """The dimension of ``base`` that the rows of a view of its memory go along; None if there is none."""
    stride, size = view.stride(rows.dim), view.shape[rows.dim]
    dims = [d for d in range(base.ndim) if base.stride(d) == stride and base.shape[d] == size]
    return dims[0] if len(dims) == 1 and size % batch == 0 else None


__all__ = ["arange", "as_view_of", "concatenate", "create", "expand", "move", "pad", "repeat"]
