"""ATen operators by name: the arithmetic of each, and the arguments that it reads only in part.

Names are those of the schema without ``aten::``, and ``add_`` is listed as ``add``. Operators need no entry
that ``torch.utils.flop_counter`` knows, or that torch tags as pointwise and that take one operation per
element.
"""

from collections.abc import Mapping
from typing import NamedTuple


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _each(rows: Mapping[int, str]) -> dict[str, int]:
    return {name: count for count, names in rows.items() for name in names.split()}


ALLOCATIONS = _names("empty empty_like empty_permuted empty_strided new_empty new_empty_strided")
"""Operators that reserve memory and write nothing to it."""

DATA_MOVEMENT = _names(
    """
    _to_copy _unsafe_index _unsafe_index_put _unsafe_masked_index arange as_strided_scatter cat clone
    col2im constant_pad_nd copy diag_embed diagonal_backward diagonal_scatter embedding eye fill flip full
    full_like gather im2col index index_copy index_put index_select lift_fresh_copy linspace
    masked_scatter masked_select new_full new_ones new_zeros nll_loss2d_backward nll_loss2d_forward
    nll_loss_backward nll_loss_forward nonzero ones ones_like pixel_shuffle pixel_unshuffle
    reflection_pad1d reflection_pad2d repeat replication_pad2d roll scalar_tensor scatter select_backward
    select_scatter slice_backward slice_scatter stack take tril tril_indices triu triu_indices
    unfold_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d zero zeros zeros_like
    """
)
"""Operators that move data and compute nothing."""

FLOPS_PER_OUTPUT: Mapping[str, int] = _each(
    {
        1: "floor_divide isin",
        3: """
            _prelu_kernel _prelu_kernel_backward addcdiv addcmul hardsigmoid_backward hardswish
            hardswish_backward hardtanh_backward leaky_relu leaky_relu_backward lerp
            native_dropout_backward softshrink_backward upsample_nearest1d_backward
            upsample_nearest2d_backward upsample_nearest3d_backward
            """,
        9: "avg_pool2d max_pool2d_with_indices pipec::interpolate",
        10: """
            acos asin atan atan2 bernoulli bucketize cos cosh elu erf erfc exp exp2 exponential expm1 glu
            log log10 log1p log2 logit multinomial native_dropout normal normal_functional pow rand
            rand_like randint randn randn_like randperm rsqrt searchsorted sigmoid silu sin sinh sqrt tan
            tanh uniform
            """,
        20: """
            elu_backward gelu gelu_backward glu_backward log_sigmoid_backward log_sigmoid_forward logaddexp
            mish mish_backward silu_backward softplus softplus_backward
            """,
        27: "avg_pool3d max_pool3d_with_indices",
    }
)
"""Operations per element of the first output. An elementary function or a random number counts 10,
about what the polynomial that evaluates it takes; a pooling window counts as 3 wide."""

FLOPS_PER_INPUT: Mapping[str, int] = _each(
    {
        1: """
            _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d
            adaptive_max_pool2d_backward all amax amin any argmax argmin bincount cumprod cumsum
            embedding_dense_backward histc index_add max max_pool2d_with_indices_backward mean min prod
            reflection_pad1d_backward reflection_pad2d_backward scatter_add scatter_reduce sum
            """,
        2: "dot linalg_vector_norm mse_loss mse_loss_backward mv norm",
        3: "huber_loss huber_loss_backward smooth_l1_loss smooth_l1_loss_backward",
        4: "_softmax_backward_data std std_mean var var_mean",
        8: """
            _batch_norm_with_update _batch_norm_with_update_functional _fused_rms_norm
            _native_batch_norm_legit _native_batch_norm_legit_functional
            _native_batch_norm_legit_no_training avg_pool2d_backward cudnn_batch_norm native_batch_norm
            native_group_norm native_layer_norm pipec::interpolate_backward
            """,
        14: """
            _fused_rms_norm_backward _log_softmax _log_softmax_backward_data _safe_softmax _softmax
            _weight_norm_interface _weight_norm_interface_backward batch_norm_backward
            cudnn_batch_norm_backward logcumsumexp logsumexp
            native_batch_norm_backward native_group_norm_backward native_layer_norm_backward
            """,
        20: "binary_cross_entropy binary_cross_entropy_backward sort topk",
    }
)
"""Operations per element of the first tensor argument: reductions, normalisations, their gradients."""


class RecurrentOperator(NamedTuple):
    """A recurrent layer in one operator: which arguments it multiplies, and how often.

    ``steps`` is the argument of shape (length, rows, ...). ``launches`` are the kernels that each step
    starts; without any, there is one kernel for all. A backward that computes the layer again multiplies
    three times.
    """

    steps: str
    weights: tuple[str, ...]
    products: int
    launches: int


RECURRENT_OPERATORS: Mapping[str, RecurrentOperator] = {
    "pipec::recurrent_layer": RecurrentOperator("x", ("weights",), 1, 1),
    "pipec::recurrent_layer_backward": RecurrentOperator("x", ("weights",), 3, 3),
    "mkldnn_rnn_layer": RecurrentOperator("input", ("weight0", "weight1"), 1, 0),
    "mkldnn_rnn_layer_backward": RecurrentOperator("input", ("weight1", "weight2"), 2, 0),
}

GATHER_SOURCES: Mapping[str, str] = {
    **dict.fromkeys(_names("_unsafe_index gather index index_select take"), "self"),
    "embedding": "weight",
}
"""Operators that read as many elements of this argument as they write, however large it is."""

SHAPE_ONLY = _names(
    """
    copy fill full_like new_full new_ones new_zeros nll_loss2d_backward nll_loss2d_forward
    nll_loss_backward nll_loss_forward ones_like rand_like randn_like uniform zero zeros_like
    """
)
"""Operators whose ``self`` only gives a shape, is overwritten, or is read at one element per target."""

SCATTER_SOURCES: Mapping[str, str] = {
    **dict.fromkeys(_names("scatter scatter_add scatter_reduce"), "src"),
    **dict.fromkeys(_names("index_add index_copy masked_scatter"), "source"),
    **dict.fromkeys(_names("_unsafe_index_put index_put"), "values"),
}
"""Operators that, in place, update as many elements of ``self`` as this argument has."""
