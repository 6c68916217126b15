"""Rules for operators that combine elements: sums, means, matrix products, statistics."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from pipec.capture.batch.dependence import (
    MEAN,
    Dependence,
    MixedRows,
    PerRow,
    SelectedRows,
    SumOverRows,
    Unproven,
    Whole,
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


def count(call: OperatorCall) -> Dependence:
    """``count_nonzero`` and its kin: a sum over rows; unproven of a sum."""
    value = call.dependence_of(call.first)
    if isinstance(value, SumOverRows):
        return call.mixed("counts in what is a sum over the rows of a microbatch")
    return (
        replace(found, degree=0)
        if isinstance(found := sum_or_mean(call), SumOverRows | PerRow | Whole)
        else found
    )


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


def nll_loss(call: OperatorCall) -> Dependence:
    """Cross entropy behind its softmax: classes are along dimension 1, or 0 of a single row."""
    scores, targets = call.dependence_of(call["self"]), call.dependence_of(call["target"])
    weight = Whole() if call["weight"] is None else call.dependence_of(call["weight"])
    if not isinstance(weight, Whole):
        return call.mixed("weighs classes by what is computed of rows")
    if isinstance(scores, Whole) and isinstance(targets, Whole):
        return Whole()
    if SelectedRows() in (scores, targets):
        return (
            SumOverRows()
            if call["reduction"] == 2 and scores == targets
            else call.mixed("divides by the number of chosen rows, which is another one in each microbatch")
        )
    ndim = call["self"].ndim
    if not isinstance(scores, PerRow) or scores.degree or (ndim > 1 and scores.dim == 1) or ndim == 1:
        return call.mixed("takes the classes over rows")
    own = scores.at(scores.dim - (scores.dim > 1))
    if targets != own:
        return call.mixed("pairs each row with the target of another one")
    if call["reduction"] == 1:
        why = "divides by the number of targets that count, which is another one in each microbatch"
        return call.unproven(why) if call.is_from_arguments(call["target"]) else call.mixed(why)
    return own if call["reduction"] == 0 else SumOverRows()


def product(call: OperatorCall) -> Dependence:
    """Matrix products: ``mm``, ``bmm``, ``mv``, ``dot``, and ``addmm`` and its kin."""
    *added, left, right = call.tensors
    made = _product(call, left, right)
    if not added or isinstance(made, MixedRows | Unproven):
        return made
    return _with_added(call, call.dependence_of(added[0]), added[0], made)


def _product(call: OperatorCall, left: Tensor, right: Tensor) -> Dependence:
    one, other = call.dependence_of(left), call.dependence_of(right)
    if SelectedRows() in (one, other):
        keeps = one == SelectedRows() and isinstance(other, Whole) and left.ndim == 2 and not other.degree
        return SelectedRows() if keeps else call.unproven()
    degree = power_of(one) + power_of(other)
    if isinstance(one, SumOverRows) or isinstance(other, SumOverRows):
        if isinstance(one, Whole) or isinstance(other, Whole):
            return SumOverRows(degree)
        return call.mixed("multiplies a sum over the rows of a microbatch")
    inner = left.ndim - 1
    is_contracted = [
        isinstance(one, PerRow) and one.dim == inner,
        isinstance(other, PerRow) and other.dim == (right.ndim - 2 if right.ndim > 1 else 0),
    ]
    if any(is_contracted):
        pairs = [(x.outer, x.inner) for x in (one, other) if isinstance(x, PerRow)]
        fills = any(isinstance(x, Whole) and x.fill is not None for x in (one, other))
        if fills or (all(is_contracted) and pairs[0] == pairs[1]):
            return SumOverRows(degree)
        return call.mixed("multiplies rows with what stands for other rows")
    kept = []
    if isinstance(one, PerRow):
        kept.append(one)
    if isinstance(other, PerRow):
        behind = right.ndim > 1 and other.dim == right.ndim - 1
        kept.append(other.at(len(call.shape) - 1) if behind else other)
    if len({(x.dim, x.outer, x.inner) for x in kept}) > 1:
        return call.mixed("multiplies each row with other rows")
    if not kept:
        return Whole(degree)
    batches = [x.shape[0] for x, v in ((left, one), (right, other)) if isinstance(v, Whole) and x.ndim == 3]
    fills = all(v.fill is not None for v in (one, other) if isinstance(v, Whole))
    if kept[0].dim == 0 and len(call.shape) == 3 and any(size != 1 for size in batches) and not fills:
        return call.unproven("multiplies rows with what stands for other rows")
    return replace(kept[0], degree=degree)


def _with_added(call: OperatorCall, value: Dependence, added: Tensor, made: Dependence) -> Dependence:
    """``addmm`` and its kin: the added operand is whole, or has the same rows."""
    if isinstance(made, PerRow) and isinstance(value, Whole):
        from_end = len(call.shape) - made.dim
        fits = added.ndim < from_end or added.shape[-from_end] == 1 or value.fill is not None
        return made if fits and made.degree == value.degree else call.unproven()
    if isinstance(made, PerRow) and isinstance(value, PerRow):
        same = replace(value, dim=value.dim + len(call.shape) - added.ndim) == made
        return made if same else call.mixed("combines each row with other rows")
    if isinstance(made, SelectedRows):
        return made if isinstance(value, Whole) and added.ndim < 2 else call.unproven()
    if value == made or (made == MEAN and value == Whole()):
        return made
    return call.mixed("adds what is no sum over rows")


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
    return tuple(rows[0].at(x.ndim - 2) for x in call.result) if rows else Whole()


def histogram(call: OperatorCall) -> Dependence:
    """``histc`` and ``bincount``: counts by value, between given limits."""
    value = call.dependence_of(call.first)
    if call.name == "histc" and call["min"] == call["max"] and not isinstance(value, Whole):
        return call.mixed("takes the smallest and the largest value of rows")
    if call.name == "bincount" and not call["minlength"] and not isinstance(value, Whole):
        return call.mixed("has as many counts as the largest value of a microbatch says; give minlength")
    if set(map(type, call.values)) == {Whole}:
        return Whole()
    is_plain = isinstance(value, PerRow) or value == SelectedRows()
    return SumOverRows() if is_plain and set(call.values) == {value} else call.unproven()
