"""Patches of torch's operators and distributions that are active during capture."""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._decomp.decompositions import upsample_compute_output_size
from torch._library.simple_registry import singleton as fake_kernels
from torch._library.utils import Kernel
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.distributions import Distribution

INTERPOLATIONS = ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")
"""Operators whose forward torch decomposes before it differentiates."""


@contextlib.contextmanager
def skip_distribution_validation() -> Iterator[None]:
    """Let ``torch.distributions`` skip checks of values, which do not exist during capture."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextlib.contextmanager
def keep_interpolation_operators() -> Iterator[None]:
    """Keep ``interpolate`` one operator, as it is in eager mode.

    torch decomposes it into some hundred operators that differ in the last bit. For a symbolic batch, the
    whole operator needs Python code that torch lacks: the sizes of the result, and the gradient's shape.
    """
    before: list[tuple[OpOverload, dict[Any, Any]]] = []
    for name in INTERPOLATIONS:
        forward, backward = getattr(torch.ops.aten, name), getattr(torch.ops.aten, f"{name}_backward").default
        before += [
            (operator, dict(operator.py_kernels)) for operator in (forward.default, forward.vec, backward)
        ]
        forward.default.py_kernels.pop(DispatchKey.Autograd, None)
        for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
            forward.vec.py_kernels[key] = functools.partial(_interpolate, forward.default)
        backward.py_kernels[DispatchKey.Meta] = _interpolate_backward
    try:
        for operator, _ in before:
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in before:
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def _interpolate(
    operator: OpOverload,
    x: torch.Tensor,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None = None,
) -> Any:
    sizes = upsample_compute_output_size(x.size(), output_size, scale_factors)
    return operator(x, sizes, align_corners, *(scale_factors or ()))


def _interpolate_backward(
    gradient: torch.Tensor, output_size: Sequence[int], input_size: Sequence[int], *options: object
) -> torch.Tensor:
    layout = suggest_memory_format(gradient)
    return torch.empty(input_size, dtype=gradient.dtype, device=gradient.device, memory_format=layout)


@contextlib.contextmanager
def bound_ctc_loss_workspace() -> Iterator[None]:
    """Give the table that ``ctc_loss`` saves for its backward the size for the longest possible target.

    Its real size depends on the values of the lengths, so that torch refuses the operator. Only the backward
    of ``ctc_loss`` reads the table. Lengths as Python numbers make the batch size a constant, and are still
    refused.
    """
    operators = {
        torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
        torch.ops.aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    }
    holders = [fake_kernels.find(operator.name()).fake_impl for operator in operators]
    before = [list(holder.kernels) for holder in holders]
    for holder, fake in zip(holders, operators.values(), strict=True):
        holder.kernels = [Kernel(fake, "pipec")]
    try:
        yield
    finally:
        for holder, kernels in zip(holders, before, strict=True):
            holder.kernels = kernels


def _ctc_loss(
    log_probabilities: torch.Tensor, targets: torch.Tensor, *options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    length, rows, _ = log_probabilities.shape
    table = log_probabilities.new_empty(rows, length, 2 * targets.shape[-1] + 1)
    return log_probabilities.new_empty(rows), table


def _ctc_loss_backward(gradient: torch.Tensor, log_probabilities: torch.Tensor, *options: object) -> Any:
    return log_probabilities.new_empty(log_probabilities.shape)


ENCODER_LAYER = (
    torch._transformer_encoder_layer_fwd,
    torch.ops.aten._transformer_encoder_layer_fwd.default,
)
"""The operator of a whole ``nn.TransformerEncoderLayer`` in evaluation mode, by both names."""

ATTENTION = (torch._native_multi_head_attention, torch.ops.aten._native_multi_head_attention.default)
"""The operator of a whole ``nn.MultiheadAttention`` in evaluation mode, by both names."""

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Operators that torch decomposes into each step of each layer while it traces them."""


@contextlib.contextmanager
def keep_recurrent_operators() -> Iterator[None]:
    """Let Dynamo trace recurrent networks for any length, as one operator each.

    Their modules would rearrange weights that have been replaced for the capture, in memory that fake tensors
    of a GPU do not have.
    """
    operators = [getattr(torch.ops.aten, name).input for name in RECURRENT]
    before = [dict(operator.py_kernels) for operator in operators]
    for operator in operators:
        for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
            operator.py_kernels[key] = _recurrent
        operator._dispatch_cache.clear()
    flatten_parameters = torch.nn.RNNBase.flatten_parameters
    torch.nn.RNNBase.flatten_parameters = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.RNNBase.flatten_parameters = flatten_parameters  # type: ignore[method-assign]
        for operator, kernels in zip(operators, before, strict=True):
            operator.py_kernels.clear()
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def _recurrent(
    x: torch.Tensor, states: Any, weights: Sequence[torch.Tensor], *options: Any
) -> tuple[torch.Tensor, ...]:
    """Tensors with the shapes of the results, which require gradients if the weights do."""
    _, _, _, _, bidirectional, batch_first = options
    states = (states,) if isinstance(states, torch.Tensor) else states
    x = x.transpose(0, 1) if batch_first else x
    output = x.new_zeros(*x.shape[:2], states[0].shape[-1] * (1 + bidirectional)) + weights[0].sum()
    output = output.transpose(0, 1) if batch_first else output
    return output, *(torch.zeros_like(state) + weights[0].sum() for state in states)


def computes_with_onednn(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether eager torch calls oneDNN for an LSTM with these tensors. In 16 bits, the CPU decides."""
    enabled = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    return enabled and all(x.device.type == "cpu" and x.dtype is torch.float32 for x in tensors)


def computes_with_cudnn(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether eager torch calls cuDNN for a recurrent layer with these tensors.

    Autocast converts some of them for its operators, which is not copied here.
    """
    cudnn = torch.backends.cudnn
    return (
        cudnn.is_available()
        and bool(cudnn.enabled)
        and not torch.is_autocast_enabled("cuda")
        and all(x.device.type == "cuda" and x.dtype is tensors[0].dtype for x in tensors)
        and tensors[0].dtype in cudnn.CUDNN_TENSOR_DTYPES
    )


@functools.cache
def decompositions() -> dict[Any, Any]:
    """torch's decompositions of operators into simpler ones."""
    return dict(decomposition_table)
