"""Rules for operators that combine elements: sums, means, matrix products, statistics."""

from collections.abc import Callable, Sequence
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
from pipec.capture.batch.operator_call import OperatorCall, mixed_or_unproven, per_row_among


def dims_of(call: OperatorCall) -> list[int]:
    """The dimensions that a call names as ``dim``; all of them if it names none."""
    given = call.arguments.get("dim", call.arguments.get("dims"))
    ndim = call.first.ndim
    if given is None or given == []:
        return list(range(ndim))
    return [dim % ndim if ndim else 0 for dim in (given if isinstance(given, list | tuple) else [given])]


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
    call.require_no_row_numbers()
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


def reduction(call: OperatorCall) -> Dependence:
    """Other reductions: along rows they mix them."""
    value, dims = call.dependence_of(call.first), dims_of(call)
    if unknown := mixed_or_unproven(call.values):
        return unknown
    if isinstance(value, SelectedRows) and 0 not in dims:
        return value
    if isinstance(value, SelectedRows):
        return call.mixed(f"takes {call.name} over rows")
    call.require_no_row_numbers()
    if isinstance(value, SumOverRows):
        return call.mixed("computes, of a sum over the rows of a microbatch, what is no multiple of it")
    if power_of(value):
        return call.mixed("computes with the number of rows, which is another one in a microbatch")
    if isinstance(value, PerRow):
        if value.dim in dims:
            return call.mixed(f"takes {call.name} over rows")
        return _left(call, value, dims)
    return Whole()


def _left(call: OperatorCall, rows: PerRow, dims: Sequence[int]) -> PerRow:
    """The rows after some other dimensions are removed."""
    result = call.result[0] if isinstance(call.result, tuple | list) else call.result
    keeps = result.ndim == call.first.ndim
    return rows if keeps else rows.at(rows.dim - sum(dim < rows.dim for dim in set(dims)))


def along_dim(call: OperatorCall) -> Dependence | tuple[Dependence, ...]:
    """Operators that let elements along ``dim`` depend on one another, and keep the shape."""
    value, dims = call.dependence_of(call.first), dims_of(call)
    if unknown := mixed_or_unproven(call.values):
        return unknown
    if isinstance(value, PerRow) and value.dim in dims:
        if call.name == "sort" and not call.first.is_floating_point():
            return call.unproven("sorts rows by their numbers, and may put them back")
        return call.mixed(f"computes {call.name} over rows")
    if isinstance(value, SelectedRows) and (0 in dims or value.are_indices):
        return call.mixed(f"computes {call.name} over rows")
    if isinstance(value, SelectedRows) and len(call.values) == 1:
        return value
    if isinstance(value, SumOverRows):
        return value if call.name in ("cumsum",) else each_row_alone(call)
    return each_row_alone(call)


def each_row_alone(call: OperatorCall) -> Dependence:
    """A rule for operators that compute each row by itself."""
    if unknown := mixed_or_unproven(call.values):
        return unknown
    call.require_no_row_numbers()
    rows = per_row_among(call.values)
    if any(isinstance(value, SumOverRows) for value in call.values):
        return call.mixed("computes, of a sum over the rows of a microbatch, what is no multiple of it")
    if any(isinstance(value, SelectedRows) for value in call.values):
        return call.unproven("computes with rows that values choose")
    if any(power_of(value) for value in call.values):
        return call.mixed("computes with the number of rows, which is another one in a microbatch")
    if len(set(rows)) > 1:
        return call.mixed("combines each row with other rows")
    return rows[0] if rows else Whole()


def elementwise_loss(call: OperatorCall) -> Dependence:
    """Elementwise losses with an argument ``reduction``: none, mean or sum."""
    if unknown := mixed_or_unproven(call.values):
        return unknown
    call.require_no_row_numbers()
    ndim = max(x.ndim for x in call.tensors)
    rows = {
        v.at(v.dim - x.ndim) for x, v in zip(call.tensors, call.values, strict=True) if isinstance(v, PerRow)
    }
    if any(isinstance(value, SumOverRows | SelectedRows) or power_of(value) for value in call.values):
        return call.unproven()
    if not rows:
        return Whole()
    if len(rows) > 1 or any(
        isinstance(v, Whole) and v.fill is None and x.ndim and x.shape[0] != 1 and x.ndim == ndim
        for x, v in zip(call.tensors, call.values, strict=True)
    ):
        return call.mixed("combines each row with other rows")
    one = rows.pop()
    made: tuple[Dependence, ...] = (one.at(one.dim + ndim), MEAN, SumOverRows())
    return made[int(call["reduction"])]


def margin_loss(call: OperatorCall) -> Dependence:
    """Losses of scores (rows, classes) and targets (rows, ...)."""
    scores, targets = (call.dependence_of(call[name]) for name in ("self", "target"))
    others = [value for value in call.values if not isinstance(value, PerRow)]
    if unknown := mixed_or_unproven(call.values):
        return unknown
    call.require_no_row_numbers()
    if (
        scores != targets
        or scores != PerRow(0)
        or call["self"].ndim != 2
        or any(value != Whole() for value in others)
    ):
        return call.mixed("combines each row with other rows")
    made: tuple[Dependence, ...] = (scores, MEAN, SumOverRows())
    return made[int(call["reduction"])]


def nll_loss(call: OperatorCall) -> Dependence:
    """Cross entropy behind its softmax: classes are along dimension 1, or 0 of a single row."""
    if unknown := mixed_or_unproven(call.values):
        return unknown
    call.require_no_row_numbers()
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
    if unknown := mixed_or_unproven(call.values):
        return unknown
    call.require_no_row_numbers()
    *added, left, right = call.tensors
    made = _product(call, left, right)
    if not added or mixed_or_unproven([made]):
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


def layer_norm(call: OperatorCall) -> Dependence:
    """Statistics over the last dimensions."""
    value = call.dependence_of(call.first)
    if isinstance(value, PerRow) and value.dim >= call.first.ndim - len(call["normalized_shape"]):
        return call.mixed("takes statistics over rows")
    if isinstance(value, SelectedRows) and call.first.ndim > len(call["normalized_shape"]):
        return value if all(isinstance(v, Whole) for v in call.values[1:]) else call.unproven()
    return _only_first(call, value)


def group_norm(call: OperatorCall) -> Dependence:
    value = call.dependence_of(call.first)
    if isinstance(value, PerRow) and value.dim:
        return call.mixed("takes statistics over rows")
    return _only_first(call, value)


def _only_first(call: OperatorCall, value: Dependence) -> Dependence:
    """A rule for operators whose further arguments are parameters."""
    if any(isinstance(v, PerRow) for v in call.values[1:]):
        return call.unproven()
    return each_row_alone(call)


def within_last_dims(num: int) -> Callable[[OperatorCall], Dependence]:
    """A rule for operators that work within the last ``num`` dimensions."""

    def rule(call: OperatorCall) -> Dependence:
        for tensor, value in zip(call.tensors, call.values, strict=True):
            if isinstance(value, PerRow) and value.dim >= tensor.ndim - num:
                return call.mixed(f"computes {call.name} over rows")
        return each_row_alone(call)

    return rule


def interpolate(call: OperatorCall) -> Dependence:
    """Images of shape (rows, channels, ...)."""
    return within_last_dims(call.first.ndim - 2)(call)


def convolution(call: OperatorCall) -> Dependence:
    """The batch is dimension 0; or the channels, with a kernel for each row."""
    x, weight = call.dependence_of(call["input"]), call.dependence_of(call["weight"])
    if isinstance(x, PerRow) and isinstance(weight, PerRow) and x.dim == 1 and weight.dim == 0:
        bias = call.dependence_of(call["bias"]) if call["bias"] is not None else weight
        is_own = bias == weight and not weight.is_row_number and not x.is_row_number
        if call.is_row_multiple(call["groups"]) and call["groups"] == call.rows and is_own:
            return (
                x.at(1)
                if x.inner == weight.inner and x.outer == weight.outer == 1
                else replace(x, inner=weight.inner)
            )
        return call.mixed("computes convolution over rows")
    if isinstance(x, PerRow) and x.dim:
        return call.mixed("computes convolution over rows")
    if isinstance(x, SelectedRows):
        return x if all(isinstance(v, Whole) for v in call.values[1:]) else call.unproven()
    return _only_first(call, x)


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
    if unknown := mixed_or_unproven(call.values):
        return unknown
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
    if unknown := mixed_or_unproven(call.values):
        return unknown
    call.require_no_row_numbers()
    if call.name == "histc" and call["min"] == call["max"] and not isinstance(value, Whole):
        return call.mixed("takes the smallest and the largest value of rows")
    if call.name == "bincount" and not call["minlength"] and not isinstance(value, Whole):
        return call.mixed("has as many counts as the largest value of a microbatch says; give minlength")
    if set(map(type, call.values)) == {Whole}:
        return Whole()
    is_plain = isinstance(value, PerRow) or value == SelectedRows()
    return SumOverRows() if is_plain and set(call.values) == {value} else call.unproven()


def search_sorted(call: OperatorCall) -> Dependence:
    """``searchsorted`` and ``bucketize``: positions of values in a sorted tensor."""
    table = call.arguments.get("sorted_sequence", call.arguments.get("boundaries"))
    values = call["self"]
    if not isinstance(values, Tensor) or not isinstance(table, Tensor):
        return call.unproven()
    of_table, of_values = call.dependence_of(table), call.dependence_of(values)
    if unknown := mixed_or_unproven([of_table, of_values]):
        return unknown
    call.require_no_row_numbers()
    if isinstance(of_table, Whole) and not of_table.degree and table.ndim == 1:
        return of_values if isinstance(of_values, PerRow) and not of_values.degree else each_row_alone(call)
    if isinstance(of_table, PerRow) and of_table.dim == table.ndim - 1:
        return call.mixed("looks values up among rows")
    return each_row_alone(call) if of_table == of_values else call.unproven()


def pairwise(call: OperatorCall) -> Dependence:
    """``cdist``: distances of (..., p, m) and (..., r, m), of shape (..., p, r)."""
    if unknown := mixed_or_unproven(call.values):
        return unknown
    call.require_no_row_numbers()
    found = set()
    for place, (tensor, value) in enumerate(zip(call.tensors[:2], call.values[:2], strict=True)):
        if isinstance(value, SumOverRows | SelectedRows) or power_of(value):
            return call.unproven()
        if isinstance(value, PerRow):
            from_end = tensor.ndim - value.dim
            if from_end == 1:
                return call.mixed("takes distances over rows")
            found.add(value.at(len(call.shape) - (from_end if from_end > 2 else 2 - place)))
    if len(found) > 1:
        return call.mixed("combines each row with other rows")
    return found.pop() if found else Whole()


def attention(call: OperatorCall) -> tuple[Dependence, ...] | Dependence:
    """Kernels for attention over (rows, heads, length, width); ``attn_mask`` broadcasts."""
    mask = call.arguments.get("attn_mask", call.arguments.get("attn_bias"))
    values = [call.dependence_of(call[name]) for name in ("query", "key", "value")]
    if unknown := mixed_or_unproven(call.values):
        return unknown
    if set(values) != {values[0]} or not isinstance(values[0], PerRow) or values[0].dim > 1:
        return call.unproven()
    if isinstance(mask, Tensor):
        of_mask = call.dependence_of(mask)
        aligned = of_mask.at(of_mask.dim + 4 - mask.ndim) if isinstance(of_mask, PerRow) else of_mask
        if not (isinstance(aligned, Whole) or aligned == values[0]):
            return call.unproven()
    return values[0]
