"""The rule of each operator: how the dependence of its results follows from that of its arguments.

Elementwise operators are recognised by torch's own tag. An operator without a rule is decomposed by torch's
decompositions; one without a decomposition is unproven.
"""

from collections.abc import Mapping

from pipec.capture.batch import indexing as i
from pipec.capture.batch import movement as m
from pipec.capture.batch import reductions as r
from pipec.capture.batch.dependence import Dependence, PerRow, SelectedRows, Whole
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


def _row_numbers(call: OperatorCall) -> Dependence:
    """Row numbers that count from the first row of the batch, which belong to their rows."""
    value = call.dependence_of(call.first)
    return PerRow(value.dim) if isinstance(value, PerRow) else call.unproven()


def _ctc_loss(call: OperatorCall) -> tuple[Dependence, ...] | Dependence:
    scores, lengths = call.values[0], call.values[1:]
    if unknown := mixed_or_unproven(call.values):
        return unknown
    if scores == PerRow(1) and all(value in (PerRow(0), SelectedRows()) for value in lengths):
        return PerRow(0)  # targets may stand one behind the other, as many as their lengths say
    return call.unproven()


_MOVES = (
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "_reshape_alias",
        "permute",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
    ),
    *("select", "unbind", "slice", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"),
    *("unfold", "diagonal", "diag", "flip", "roll", "as_strided", "view_as_complex", "view_as_real"),
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

_REDUCES = (
    *("amax", "amin", "max", "min", "argmax", "argmin", "aminmax", "any", "all", "prod", "std", "var"),
    *("var_mean", "std_mean", "logsumexp", "norm", "linalg_vector_norm", "median", "nanmedian", "mode"),
    *("kthvalue", "nansum"),
)

_ALONG = (
    *("softmax", "_softmax", "_safe_softmax", "_log_softmax", "log_softmax", "sort", "argsort", "topk"),
    *("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "_cummax_helper", "glu"),
    *("_fft_r2c", "_fft_c2c", "_fft_c2r", "diff", "linalg_cross", "msort"),
)

_BY_REDUCTION = (
    *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"),
    "binary_cross_entropy_with_logits",
)

_MATRICES = (
    *(
        "linalg_inv_ex",
        "inverse",
        "linalg_cholesky_ex",
        "cholesky",
        "linalg_eigh",
        "_linalg_eigh",
        "linalg_qr",
    ),
    *("_linalg_svd", "_linalg_det", "_linalg_slogdet", "linalg_lu_factor_ex", "linalg_lu", "tril", "triu"),
    *(
        "linalg_matrix_exp",
        "_linalg_solve_ex",
        "linalg_solve_triangular",
        "triangular_solve",
        "cholesky_solve",
    ),
    *("linalg_pinv", "linalg_eig", "linalg_eigvals", "_linalg_eigvals", "lu_unpack", "linalg_lu_solve"),
)

_ELEMENTWISE = (
    *("masked_fill", "where", "native_dropout", "_fused_dropout", "rrelu_with_noise", "log_sigmoid"),
    "log_sigmoid_forward",
)
"""Elementwise operators that torch does not tag so."""

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(KEEPING, pointwise),
    **dict.fromkeys(_ELEMENTWISE, pointwise),
    **dict.fromkeys(_MOVES, m.move),
    **dict.fromkeys(("cat", "stack"), m.concatenate),
    **dict.fromkeys(_CREATES, m.create),
    **dict.fromkeys(_DRAWS, _drawn),
    **dict.fromkeys(("sum", "mean"), r.sum_or_mean),
    **dict.fromkeys(_REDUCES, r.reduction),
    **dict.fromkeys(_ALONG, r.along_dim),
    **dict.fromkeys(_BY_REDUCTION, r.elementwise_loss),
    **dict.fromkeys(("multi_margin_loss", "multilabel_margin_loss_forward"), r.margin_loss),
    **dict.fromkeys(_MATRICES, r.within_last_dims(2)),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "baddbmm"), r.product),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), r.nll_loss),
    **dict.fromkeys(
        (
            *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"),
            *("cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update", "_batch_norm_no_update"),
        ),
        r.batch_norm,
    ),
    **dict.fromkeys(("histc", "bincount"), r.histogram),
    **dict.fromkeys(("searchsorted", "bucketize"), r.search_sorted),
    **dict.fromkeys(("_cdist_forward", "_euclidean_dist"), r.pairwise),
    **dict.fromkeys(("convolution", "_convolution", "mkldnn_convolution"), r.convolution),
    **dict.fromkeys(
        (
            *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
            *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        ),
        r.attention,
    ),
    **dict.fromkeys(
        ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill"), i.scatter
    ),
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), i.index_put),
    **dict.fromkeys(("index", "_unsafe_index"), i.index),
    **dict.fromkeys(("nonzero", "argwhere"), i.nonzero),
    **{
        f"upsample_{kind}": r.within_last_dims(n)
        for kind, n in (("nearest1d", 1), ("linear1d", 1), ("nearest2d", 2))
    },
    **{f"upsample_{kind}2d": r.within_last_dims(2) for kind in ("bilinear", "bicubic", "trilinear")},
    **{f"_upsample_{kind}2d_aa": r.within_last_dims(2) for kind in ("bilinear", "bicubic")},
    **{f"_upsample_nearest_exact{n}d": r.within_last_dims(n) for n in (1, 2, 3)},
    **dict.fromkeys(("upsample_nearest3d", "upsample_trilinear3d"), r.within_last_dims(3)),
    **{
        f"{kind}{n}d": r.within_last_dims(n)
        for kind in ("reflection_pad", "replication_pad")
        for n in (1, 2, 3)
    },
    **{
        f"{kind}{n}d{rest}": r.within_last_dims(n)
        for kind in ("avg_pool", "max_pool", "adaptive_avg_pool", "_adaptive_avg_pool", "adaptive_max_pool")
        for n in (1, 2, 3)
        for rest in ("", "_with_indices")
    },
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "im2col"), r.within_last_dims(3)),
    **dict.fromkeys(("fractional_max_pool2d", "max_unpool2d", "col2im"), r.within_last_dims(2)),
    "grid_sampler_2d": r.within_last_dims(3),
    "grid_sampler_3d": r.within_last_dims(4),
    "affine_grid_generator": r.within_last_dims(2),
    "expand": m.expand,
    "repeat": m.repeat,
    "constant_pad_nd": m.pad,
    "arange": m.arange,
    "randperm": _permutation,
    "count_nonzero": r.count,
    "native_layer_norm": r.layer_norm,
    "_fused_rms_norm": r.layer_norm,
    "native_group_norm": r.group_norm,
    "multinomial": r.within_last_dims(1),
    "_ctc_loss": _ctc_loss,
    "embedding": i.embedding,
    "index_select": i.index_select,
    "gather": i.gather,
    "masked_select": i.masked_select,
    "masked_scatter": i.masked_scatter,
    "pipec::batch_counts": lambda call: Whole(),
    "pipec::batch_fraction": _batch_fraction,
    "pipec::row_numbers": _row_numbers,
    "pipec::ctc_loss": _ctc_loss,
    "pipec::interpolate": r.interpolate,
    "pipec::recurrent_layer": r.recurrence,
    "pipec::output_merge": lambda call: call.values[0],
}
"""By name, without the underscore of those that write into their first argument."""

KEEP_POWERS = {
    *_MOVES,
    *_CREATES,
    *KEEPING,
    *("cat", "stack", "expand", "repeat", "constant_pad_nd", "sum", "mean", "count_nonzero"),
    *("mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "baddbmm"),
    *("embedding", "index_select", "index", "_unsafe_index", "gather"),
    *("pipec::batch_counts", "pipec::batch_fraction", "pipec::row_numbers", "pipec::output_merge"),
}
"""Operators, besides elementwise ones, whose rule knows what becomes of a power of the number of rows."""

READS_ROW_COUNT = {
    *_MOVES,
    *_CREATES,
    *_DRAWS,
    "expand",
    "repeat",
    "arange",
    "randperm",
    "native_group_norm",
    "affine_grid_generator",
    "convolution",
    "col2im",
    "bernoulli",
    "mul",
    "div",
    "add",
    "sub",
    "rsub",
    "constant_pad_nd",
}
"""Operators whose rule knows what to make of an argument that comes from the number of rows."""

IGNORES_VALUES = {name for name in _CREATES if name.endswith("_like") or name.startswith("new_")}
IGNORES_VALUES |= {"fill", "zero", "pipec::batch_counts"}
"""Operators whose result does not depend on the values that their first argument has here."""


def rule_of(name: str, is_elementwise: bool) -> Rule | None:
    """The rule of an operator, by its name and by torch's tag."""
    return RULES.get(name) or (pointwise if is_elementwise else None)
