"""Rules for operators that combine elements: sums, means, matrix products, statistics."""

from collections.abc import Sequence
from dataclasses import replace

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


def dims_of(call: OperatorCall) -> list[int]:
    """The dimensions of the first argument along which a call lets elements depend on one another.

    Those that it names, or all if it names none. Matrices are in the last two dimensions, and so are the
    queries of an attention; images in as many as the operator's name says.
    """
    ndim = call.first.ndim
    if "normalized_shape" in call.arguments:
        return list(range(ndim - len(call["normalized_shape"]), ndim))
    if call.name == "native_group_norm":
        return list(range(1, ndim))
    if call.name == "pipec::interpolate":
        return list(range(2, ndim))
    if call.name in LAST_DIMS:
        return list(range(max(ndim - LAST_DIMS[call.name], 0), ndim))
    given = call.arguments.get("dim", call.arguments.get("dims"))
    if given is None or given == []:
        return list(range(ndim))
    return [dim % ndim if ndim else 0 for dim in (given if isinstance(given, list | tuple) else [given])]


_MATRICES = (
    *("linalg_inv_ex", "linalg_cholesky_ex", "cholesky", "_linalg_eigh"),
    *("linalg_qr", "_linalg_svd", "_linalg_det", "_linalg_slogdet", "linalg_lu_factor_ex", "linalg_lu"),
    *("tril", "triu", "linalg_matrix_exp", "_linalg_solve_ex", "linalg_solve_triangular"),
    *("triangular_solve", "cholesky_solve", "linalg_pinv", "linalg_eig"),
    *("_linalg_eigvals", "lu_unpack", "linalg_lu_solve"),
)

_ATTENTIONS = (
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)

LAST_DIMS = {
    **dict.fromkeys((*_MATRICES, *_ATTENTIONS), 2),
    **{
        f"{kind}{n}d{rest}": n
        for kind in (
            *("avg_pool", "max_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool"),
            *("reflection_pad", "replication_pad", "_upsample_nearest_exact", "upsample_nearest"),
            *("upsample_linear", "upsample_bilinear", "upsample_bicubic", "upsample_trilinear"),
            *("_upsample_bilinear", "_upsample_bicubic"),
        )
        for n in (1, 2, 3)
        for rest in ("", "_with_indices", "_aa")
    },
    "multinomial": 1,
}
"""Operators that work within so many of the last dimensions."""


def sum_or_mean(call: OperatorCall) -> Dependence:
    """``sum`` and ``mean``."""
    value, is_mean = call.dependence_of(call.first), call.name == "mean"
    dims = dims_of(call)
    if isinstance(value, SelectedRows):
        if 0 not in dims:
            return value
        if value.are_indices or is_mean:
            return call.mixed(
                "takes the mean of rows that values choose, of which microbatches have different numbers"
            )
        return SumOverRows()
    if isinstance(value, Whole):
        return replace(value, fill=None)
    if not isinstance(value, PerRow):
        return value
    if value.dim in dims:
        return SumOverRows(value.degree - is_mean)
    return _left(call, value, dims)


def along_dims(call: OperatorCall) -> Dependence:
    """Operators that let elements along some dimensions depend on one another, or reduce these."""
    value, dims = call.dependence_of(call.first), dims_of(call)
    others = [v for x, v in zip(call.tensors, call.values, strict=True) if x is not call.first]
    if isinstance(value, SelectedRows) and (0 in dims or value.are_indices):
        return call.mixed(f"computes {call.name} over rows")
    if isinstance(value, SelectedRows):
        return value if all(isinstance(v, Whole) for v in others) else call.unproven()
    if isinstance(value, SumOverRows) and call.name == "cumsum":
        return value
    from_end = {dim - call.first.ndim for dim in dims}
    pairs = zip(call.tensors, call.values, strict=True)
    if any(isinstance(v, PerRow) and v.dim - x.ndim in from_end for x, v in pairs):
        if call.name == "sort" and not call.first.is_floating_point():
            return call.unproven("sorts rows by their numbers, and may put them back")
        return call.mixed(f"computes {call.name} over rows")
    made = each_row_alone(call)
    return _left(call, made, dims) if isinstance(made, PerRow) else made


def _left(call: OperatorCall, rows: PerRow, dims: Sequence[int]) -> PerRow:
    """The rows after some other dimensions are removed."""
    keeps = len(call.shape) == call.first.ndim
    return rows if keeps else rows.at(rows.dim - sum(dim < rows.dim for dim in set(dims)))


REDUCING = (
    *("amax", "amin", "max", "min", "argmax", "argmin", "aminmax", "any", "all", "prod", "std", "var"),
    *("var_mean", "std_mean", "logsumexp", "norm", "linalg_vector_norm", "median", "nanmedian", "mode"),
    *("kthvalue", "nansum"),
)


def each_row_alone(call: OperatorCall) -> Dependence:
    """A rule for operators that compute each row by itself, along one dimension counted from the last."""
    if any(isinstance(value, SumOverRows) for value in call.values):
        return call.mixed("computes, of a sum over the rows of a microbatch, what is no multiple of it")
    if any(isinstance(value, SelectedRows) for value in call.values):
        return call.unproven("computes with rows that values choose")
    pairs = zip(call.tensors, call.values, strict=True)
    rows = {v.at(v.dim - x.ndim) for x, v in pairs if isinstance(v, PerRow)}
    if len(rows) > 1:
        return call.unproven("combines rows of several shapes")
    if not rows:
        return Whole()
    (one,), ndim = rows, max(x.ndim for x in call.tensors)
    for x, v in zip(call.tensors, call.values, strict=True):
        if (
            isinstance(v, Whole)
            and v.fill is None
            and x.ndim > max(1, -one.dim - 1)
            and x.shape[one.dim] != 1
        ):
            return call.unproven("combines rows with what stands for other rows")
    return one.at(one.dim + ndim)


def product(call: OperatorCall) -> Dependence:
    """``mm`` and ``bmm``: dimensions of both arguments stay where they are, or are summed over."""
    (left, right), (one, other) = call.tensors, call.values
    if SelectedRows() in (one, other):
        keeps = one == SelectedRows() and is_whole(other) and left.ndim == 2
        return SelectedRows() if keeps else call.unproven()
    degree = power_of(one) + power_of(other)
    if isinstance(one, SumOverRows) or isinstance(other, SumOverRows):
        if isinstance(one, Whole) or isinstance(other, Whole):
            return SumOverRows(degree)
        return call.mixed("multiplies a sum over the rows of a microbatch")
    rows = {
        v.at(-1 if v.dim == inner else v.dim)
        for v, inner in ((one, left.ndim - 1), (other, right.ndim - 2))
        if isinstance(v, PerRow)
    }
    if not rows:
        return Whole(degree)
    if len({(v.dim, v.outer, v.inner) for v in rows}) > 1:
        return call.mixed("multiplies each row with other rows")
    found = next(iter(rows))
    for x, v in zip(call.tensors, call.values, strict=True):
        if (
            isinstance(v, Whole)
            and v.fill is None
            and (found.dim < 0 or (left.ndim == 3 and not found.dim and len(x) != 1))
        ):
            return call.unproven("multiplies rows with what stands for other rows")
    return SumOverRows(degree) if found.dim < 0 else replace(found, degree=degree)


def convolution(call: OperatorCall) -> Dependence | tuple[Dependence, ...]:
    """The batch is dimension 0; rows may also be channels, each with a kernel of its own."""
    x, *others = call.values
    if isinstance(x, PerRow) and x.dim == 1 and isinstance(others[0], PerRow):
        return call.assumed()
    if isinstance(x, PerRow) and x.dim:
        return call.mixed("computes convolution over rows")
    if any(not isinstance(value, Whole) for value in others):
        return call.unproven()
    return x if isinstance(x, PerRow | SelectedRows) else each_row_alone(call)


def batch_norm(call: OperatorCall) -> tuple[Dependence, ...] | Dependence:
    """In training rows share their statistics: a declared exception, which the tracker notes."""
    value = call.dependence_of(call.first)
    training = call.arguments.get("training", call.arguments.get("train", call.name.endswith("legit")))
    if call.name in ("_native_batch_norm_legit_no_training",):
        training = False
    if isinstance(value, PerRow) and value.dim != 1:
        per_channel = [v for v in call.values[1:] if not isinstance(v, Whole)]
        if per_channel:
            return call.unproven()
        found = each_row_alone(call)
        return (found, *[Whole()] * 4) if training else found
    if isinstance(value, PerRow):
        rest = {v.at(1) if isinstance(v, PerRow) else v for v in call.values[1:]} - {value}
        return (value, *[value.at(0)] * 4) if rest <= {Whole()} else call.unproven()
    return each_row_alone(call)


def recurrence(call: OperatorCall) -> tuple[Dependence, ...] | Dependence:
    """A layer of an LSTM, GRU or RNN over (length, rows, width), with states (directions, rows, width)."""
    values = [value for value in call.values if not isinstance(value, Whole)]
    rows = per_row_among(values)
    if len(rows) < len(values):
        return call.unproven()
    for tensor, value in zip(call.tensors, call.values, strict=True):
        if isinstance(value, PerRow) and value.dim != tensor.ndim - 2:
            return call.mixed("goes over rows as if they were steps in time")
    if len({(x.outer, x.inner, x.degree) for x in rows}) > 1 or any(x.degree for x in rows):
        return call.mixed("combines each row with other rows")
    return tuple(rows[0].at(x.ndim - 2) for x in call.result)


def histogram(call: OperatorCall) -> Dependence:
    """``histc`` and ``bincount``: counts by value, between given limits."""
    value = call.dependence_of(call.first)
    has_limits = call["minlength"] > 0 if call.name == "bincount" else call["min"] != call["max"]
    if not has_limits:
        return call.mixed("counts between limits that follow from its rows; give minlength, or min and max")
    is_plain = isinstance(value, PerRow) or value == SelectedRows()
    return SumOverRows() if is_plain and set(call.values) == {value} else call.unproven()
