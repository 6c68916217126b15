"""The gradient of cross entropy by the logits, some rows at a time.

torch computes it in two steps, through a tensor as large as the logits that has one nonzero number per row.
Here both steps run on blocks of rows that fit into a core's cache. Rows do not depend on each other, so the
bits are torch's. If last bits do not matter, the gradient is computed from the probabilities, without such
a tensor.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten

_BLOCK_BYTES = 1 << 20

_MEAN = 1
"""ATen's number for the mean."""


class _Loss(NamedTuple):
    """The arguments of ``nll_loss_backward`` after the logarithms."""

    target: Tensor
    weight: Tensor | None
    reduction: int
    ignore_index: int
    total_weight: Tensor


def rows_per_block(num_classes: int, itemsize: int) -> int:
    """The number of rows of logits that are differentiated together."""
    return max(1, _BLOCK_BYTES // (num_classes * itemsize))


def cross_entropy_gradient(
    grad: Tensor,
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
    *,
    out: Tensor | None = None,
    exact: bool = True,
) -> Tensor:
    """The gradient by logits with the log-softmax ``log_probabilities`` [rows, classes].

    The arguments are those of ``nll_loss_backward``. ``out`` receives the result, and may be the memory of
    ``log_probabilities``. Code under ``torch.compile`` does not write into arguments, since it may be called
    twice. If not ``exact``, the result may differ from torch's in its last bits.
    """
    loss = _Loss(target, weight, reduction, ignore_index, total_weight)
    if torch.compiler.is_compiling():
        terms: Tensor = _aten.nll_loss_backward(grad, log_probabilities, *loss)
        made: Tensor = _aten._log_softmax_backward_data(terms, log_probabilities, 1, terms.dtype)
        return made
    out = torch.empty_like(log_probabilities) if out is None else out
    make = _in_torchs_steps if exact else _by_probabilities
    make(grad, log_probabilities, loss, out)
    return out


def _blocks(log_probabilities: Tensor) -> Iterator[slice]:
    num_rows, num_classes = log_probabilities.shape
    step = rows_per_block(num_classes, log_probabilities.itemsize)
    yield from (slice(start, start + step) for start in range(0, num_rows, step))


def _in_torchs_steps(grad: Tensor, log_probabilities: Tensor, loss: _Loss, out: Tensor) -> None:
    (target, *others), blocks = loss, list(_blocks(log_probabilities))
    terms = torch.empty_like(log_probabilities[blocks[0]]) if blocks else out
    for rows in blocks:
        block = log_probabilities[rows]
        part = terms[: len(block)]
        row_grad = grad[rows] if grad.dim() else grad
        _aten.nll_loss_backward.grad_input(row_grad, block, target[rows], *others, grad_input=part)
        _aten._log_softmax_backward_data.out(part, block, 1, block.dtype, out=out[rows])


def _by_probabilities(grad: Tensor, log_probabilities: Tensor, loss: _Loss, out: Tensor) -> None:
    """Each row is the softmax, minus one at the target, times the weight of that row's loss."""
    counts = loss.target != loss.ignore_index
    target = loss.target.where(counts, 0)
    scale = grad / loss.total_weight if loss.reduction == _MEAN else grad
    scale = scale if loss.weight is None else scale * loss.weight[target]
    scale = torch.where(counts, scale, 0.0).unsqueeze(1)
    for rows in _blocks(log_probabilities):
        torch.exp(log_probabilities[rows], out=out[rows]).mul_(scale[rows])
    out.scatter_add_(1, target.unsqueeze(1), -scale)
