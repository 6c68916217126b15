"""Rules for operators that move elements: views, slices, concatenation, creation."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
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
from pipec.capture.batch.operator_call import NeedsMeanError, OperatorCall, tensors_in


def move(call: OperatorCall) -> Dependence | tuple[Dependence, ...]:
    """Sums and whole values keep their dependence; rows are found by the addresses of elements."""
    value = call.dependence_of(call.first)
    if isinstance(value, Whole) and call.name in _CUTTING and any(map(call.is_row_multiple, _integers(call))):
        why = "takes as many elements as the microbatch has rows"
        return call.mixed(why) if call.symbolic else call.unproven(why.replace("takes", "may take"))
    if str(call.op).endswith(".dtype"):
        return _reinterpreted(call, value)
    if isinstance(value, SelectedRows):
        sizes = sorted((call.first.shape[0], call.shape[0])) if call.shape[:1] else [0, 1]
        in_groups = call.name in ("view", "_unsafe_view") and not value.are_indices
        # groups that do not fit a microbatch fail
        fits = sizes[0] == sizes[1] or (in_groups and sizes[0] and sizes[1] % sizes[0] == 0)
        return value if fits else call.unproven("moves rows that values choose")
    if not isinstance(value, PerRow) or call.name in ("view_as_complex", "view_as_real"):
        return value
    if call.name == "unsqueeze":
        dim = call["dim"] % (call.first.ndim + 1)
        return value.at(value.dim + (dim <= value.dim))
    if call.name in ("flip", "roll"):
        given = call.arguments.get("dims") or range(call.first.ndim)
        mixes = value.dim in {dim % call.first.ndim for dim in given}
        return call.mixed("changes the order of rows") if mixes else value
    return _viewed(call, value)


_CUTTING = {"select", "slice", "split", "split_with_sizes", "unfold"}
_RESHAPING = {"view", "_unsafe_view", "_reshape_alias", "as_strided", "diagonal", "unfold"}


def _integers(call: OperatorCall) -> list[int]:
    return [number for number in call.numbers if isinstance(number, int) and number < sys.maxsize]


def _reinterpreted(call: OperatorCall, value: Dependence) -> Dependence:
    """``x.view(torch.int32)``: the bits of each element as another type."""
    if call.has_row_numbers:
        return call.with_row_numbers()
    if isinstance(value, SumOverRows) or power_of(value):
        return call.mixed("reads the bits of what is computed of all rows of a microbatch")
    if isinstance(value, PerRow) and value.dim == call.first.ndim - 1 and call.shape != call.first.shape:
        return call.unproven("gives rows another number of elements")
    return replace(value, fill=None) if isinstance(value, Whole) else value


def _viewed(call: OperatorCall, rows: PerRow) -> Dependence | tuple[Dependence, ...]:
    """The rows of each result of an operator that returns views."""
    shape, is_cut = call.first.shape, call.name in _CUTTING and _dim(call) == rows.dim
    is_all = call.name == "slice" and not call["start"] and call["end"] in (None, sys.maxsize)
    if is_cut and not is_all and not call.symbolic:
        return call.unproven("takes rows by their place, and this model is captured for one number of rows")
    if call.name == "as_strided" and not call.first.is_contiguous():
        return call.unproven()
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    told_apart = [0 if n == 1 and dim != rows.dim else strides[dim] for dim, n in enumerate(shape)]
    base = torch.empty_strided(shape, told_apart, device="meta")
    place = next(k for k, x in enumerate(call.args) if x is call.first)
    views = tensors_in(call.op(*call.args[:place], base, *call.args[place + 1 :], **call.kwargs))
    found = [_rows_of_view(call, rows, strides[rows.dim] * rows.inner, view) for view in views]
    why = "takes some rows of the microbatch by their place, or no longer has them one behind the other"
    return tuple(each or call.mixed(why) for each in found)


def _rows_of_view(call: OperatorCall, rows: PerRow, step: int, view: Tensor) -> PerRow | None:
    """The rows of a view of a contiguous tensor whose element at address a has row (a // step) % rows.

    The view must go from row to row along one dimension, and between rows along none.
    """
    every = step * call.rows
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        inner = step // stride if stride and step % stride == 0 else 0
        if not inner or not size or size % (call.rows * inner):
            continue
        if inner != rows.inner and call.name not in _RESHAPING:
            continue
        others = [(n, s) for k, (n, s) in enumerate(zip(view.shape, view.stride(), strict=True)) if k != dim]
        within = sum((n - 1) * s for n, s in others if s % every)
        if view.storage_offset() % every + within + (inner - 1) * stride < step:
            return replace(rows, dim=dim, outer=size // (call.rows * inner), inner=inner)
    return None


def _dim(call: OperatorCall) -> int:
    dim: Any = call.arguments.get("dim", call.arguments.get("dimension"))
    return int(dim) % call.first.ndim if call.first.ndim else 0


def expand(call: OperatorCall) -> Dependence | tuple[Dependence, ...]:
    """``expand``: as ``move``; a whole value has rows once it is expanded to the length of the batch."""
    value = call.dependence_of(call.first)
    if isinstance(value, Whole) and call.symbolic:
        before = [1] * (len(call.shape) - call.first.ndim) + [*call.first.shape]
        sizes = enumerate(zip(before, call.shape, strict=True))
        made = [dim for dim, (old, new) in sizes if call.is_row_multiple(new) and new != old]
        if len(made) == 1:
            return PerRow(made[0], call.shape[made[0]] // call.rows, degree=value.degree)
    return move(call)


def concatenate(call: OperatorCall) -> Dependence:
    """``cat``."""
    parts = [x for x in call.tensors if x.numel() or x.ndim > 1]
    values = [call.dependence_of(x) for x in parts]
    rows = [value for value in values if isinstance(value, PerRow)]
    if any(isinstance(value, SelectedRows) for value in values):
        keeps = call["dim"] % len(call.shape) != 0
        return SelectedRows() if keeps and set(values) == {SelectedRows()} else call.unproven()
    if rows and any(isinstance(value, SumOverRows) for value in values):
        return call.mixed("joins rows with what is computed of all rows of a microbatch")
    if rows:
        return _joined_rows(call, parts, values, rows)
    sums = {value.degree for value in values if isinstance(value, SumOverRows)}
    wholes = {value.degree for value in values if isinstance(value, Whole)}
    if not sums:
        return Whole(wholes.pop()) if len(wholes) == 1 else call.mixed("joins different powers of the rows")
    if len(sums) == 1 and (not wholes or (wholes == {0} and sums == {MEAN.degree})):
        return SumOverRows(sums.pop())
    if wholes <= {0} and sums <= {0, MEAN.degree}:
        made = zip(parts, values, strict=True)
        raise NeedsMeanError([x for x, value in made if value == SumOverRows()])
    return call.mixed("joins different powers of the number of rows")


def _joined_rows(
    call: OperatorCall, parts: Sequence[Tensor], values: Sequence[Dependence], rows: Sequence[PerRow]
) -> Dependence:
    dim, first = call["dim"] % len(call.shape), rows[0]
    if len({(x.dim, x.inner, x.degree, x.is_row_number) for x in rows}) > 1:
        return call.mixed("joins each row with other rows")
    if dim != first.dim:
        fills = [x.fill if isinstance(x, Whole) else None for x in values if not isinstance(x, PerRow)]
        fits = None not in fills and (not first.degree or not any(fills))
        if len({x.outer for x in rows}) > 1 or not fits:
            return call.unproven("joins rows with what has no rows")
        return first
    if len(rows) < len(values):
        return call.mixed("puts something before or behind the rows of a microbatch")
    return replace(first, outer=sum(x.outer for x in rows))


def pad(call: OperatorCall) -> Dependence:
    """``constant_pad_nd``: ``pad`` has two numbers for each dimension, from the last on."""
    value, pad, number = call.dependence_of(call.first), call["pad"], call["value"]
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
    return Whole(degree, None if degree else _fill(call))


_FILLED = {"full", "full_like", "new_full", "scalar_tensor", "fill"}


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
