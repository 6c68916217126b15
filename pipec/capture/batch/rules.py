"""The rule of each operator: how the dependence of its results follows from that of its arguments.

Elementwise operators are recognised by torch's own tag. An operator without a rule is decomposed by torch's
decompositions; one without a decomposition is taken to compute each row by itself, without a proof.
"""

from collections.abc import Mapping

from pipec.capture.batch import indexing as i
from pipec.capture.batch import movement as m
from pipec.capture.batch import reductions as r
from pipec.capture.batch.dependence import (
    MEAN,
    Dependence,
    PerRow,
    SelectedRows,
    SumOverRows,
    Whole,
    is_whole,
)
from pipec.capture.batch.operator_call import OperatorCall, Rule, mixed_or_unproven
from pipec.capture.batch.pointwise import KEEPING, pointwise


def _drawn(call: OperatorCall) -> Dependence:
    """Random numbers in place of the elements of the first argument."""
    value = call.dependence_of(call.first)
    return value if isinstance(value, PerRow | Whole) else Whole()


def _permutation(call: OperatorCall) -> Dependence:
    if any(map(call.is_row_multiple, call.shape)) or not call.symbolic:
        return call.mixed("draws a permutation of the rows, of which a microbatch has only its own")
    return Whole()


def _batch_fraction(call: OperatorCall) -> Dependence:
    """The batch fraction, which is proportional to the number of rows."""
    return Whole(degree=1)


def _loss_outside(call: OperatorCall) -> Dependence:
    """Any loss of an output: microbatches have its gradient if the output's value is made of theirs."""
    value = call.values[0]
    is_merged = value in (MEAN, SumOverRows()) or is_whole(value)
    if is_merged or (isinstance(value, PerRow) and not value.degree and not value.is_row_number):
        return MEAN
    return mixed_or_unproven([value]) or call.mixed("is no sum or mean over the rows of the batch")


def _ctc_loss(call: OperatorCall) -> tuple[Dependence, ...] | Dependence:
    scores, lengths = call.values[0], call.values[1:]
    if scores == PerRow(1) and all(value in (PerRow(0), SelectedRows()) for value in lengths):
        return PerRow(0)  # targets may stand one behind the other, as many as their lengths say
    return call.unproven()


_MOVES = (
    *("view", "_unsafe_view", "_reshape_alias", "permute", "transpose", "t"),
    *("unsqueeze", "squeeze"),
    *("select", "unbind", "slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"),
    *("unfold", "diagonal", "flip", "roll", "as_strided", "view_as_complex", "view_as_real"),
)

_CREATES = (
    *("empty", "zeros", "ones", "full", "rand", "randn", "randint", "scalar_tensor", "empty_strided"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "empty_permuted"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("fill", "zero"),
)

CONSTANT_FILLS = {name for name in _CREATES if "rand" not in name and "empty" not in name}
"""Operators whose result has one number everywhere."""

_DRAWS = (
    *("bernoulli", "normal", "uniform", "exponential", "random", "log_normal", "geometric", "cauchy"),
    *("normal_functional",),
)

DRAWN = {*_DRAWS, *(name for name in _CREATES if "rand" in name)}
"""Operators that draw every element of their result."""

_ALONG = (
    *("_softmax", "_safe_softmax", "_log_softmax", "sort", "topk", "cumsum", "cumprod", "cummax", "cummin"),
    *("logcumsumexp", "_cummax_helper", "glu", "_fft_r2c", "_fft_c2c", "_fft_c2r", "linalg_cross"),
    *("native_layer_norm", "_fused_rms_norm", "native_group_norm", "pipec::interpolate"),
)

_ELEMENTWISE = (
    *("masked_fill", "where", "native_dropout", "_fused_dropout", "rrelu_with_noise"),
    "log_sigmoid_forward",
)
"""Elementwise operators that torch does not tag so."""

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(KEEPING, pointwise),
    **dict.fromkeys(_ELEMENTWISE, pointwise),
    **dict.fromkeys(_MOVES, m.move),
    **dict.fromkeys(_CREATES, m.create),
    **dict.fromkeys(_DRAWS, _drawn),
    **dict.fromkeys((*_ALONG, *r.REDUCING, *r.LAST_DIMS), r.along_dims),
    **dict.fromkeys(("sum", "mean"), r.sum_or_mean),
    **dict.fromkeys(("mm", "bmm"), r.product),
    **dict.fromkeys(
        (
            *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
            *("cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update"),
        ),
        r.batch_norm,
    ),
    **dict.fromkeys(("histc", "bincount"), r.histogram),
    **dict.fromkeys(("convolution", "_convolution", "mkldnn_convolution"), r.convolution),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), i.scatter),
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), i.index_put),
    **dict.fromkeys(("index", "_unsafe_index"), i.index),
    "cat": m.concatenate,
    "expand": m.expand,
    "constant_pad_nd": m.pad,
    "arange": m.arange,
    "randperm": _permutation,
    "_ctc_loss": _ctc_loss,
    "gather": i.gather,
    "nonzero": i.nonzero,
    "masked_select": i.masked_select,
    "masked_scatter": i.masked_scatter,
    "pipec::batch_counts": lambda call: Whole(),
    "pipec::batch_fraction": _batch_fraction,
    "pipec::ctc_loss": _ctc_loss,
    "pipec::loss_outside": _loss_outside,
    "pipec::recurrent_layer": r.recurrence,
    "pipec::output_merge": lambda call: call.values[0],
}
"""By name, without the underscore of those that write into their first argument."""

KEEP_POWERS = {
    *_MOVES,
    *_CREATES,
    *KEEPING,
    *("cat", "expand", "constant_pad_nd", "sum", "mean", "mm", "bmm", "index", "_unsafe_index", "gather"),
    *("pipec::batch_counts", "pipec::batch_fraction", "pipec::loss_outside", "pipec::output_merge"),
}
"""Operators, besides elementwise ones, whose rule knows what becomes of a power of the number of rows."""

KEEP_ROW_NUMBERS = {
    *_MOVES,
    *_CREATES,
    *KEEPING,
    *("cat", "expand", "index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl", "ne"),
    *("pipec::batch_counts", "pipec::loss_outside", "pipec::output_merge"),
}
"""Operators whose rule knows what becomes of the numbers of rows."""

READS_ROW_COUNT = {
    *_MOVES,
    *_CREATES,
    *_DRAWS,
    *("expand", "arange", "randperm", "constant_pad_nd", "native_group_norm", "convolution"),
    *("affine_grid_generator", "col2im", "mul", "div", "add", "sub", "rsub"),
}
"""Operators whose rule knows what to make of an argument that comes from the number of rows."""

IGNORES_VALUES = {name for name in _CREATES if name.endswith("_like") or name.startswith("new_")}
IGNORES_VALUES |= {"fill", "zero", "pipec::batch_counts"}
"""Operators whose result does not depend on the values that their first argument has here."""

LOOKS_UP = {"index", "_unsafe_index", "gather"}
"""Operators that are taken to put rows back in order, if nothing is proved of these: as after a sort."""

KEEP_FILLS = {*_MOVES, *KEEPING, *IGNORES_VALUES, "expand"}
"""Operators whose result has one number everywhere if their argument has."""


def rule_of(name: str, is_elementwise: bool) -> Rule | None:
    """The rule of an operator, by its name and by torch's tag."""
    return RULES.get(name) or (pointwise if is_elementwise else None)
