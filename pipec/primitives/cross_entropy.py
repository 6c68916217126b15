"""The gradient of cross entropy by the logits, some rows at a time.

torch computes it in two steps, through a tensor as large as the logits that has one nonzero number per row.
Here both steps run on blocks of rows that fit into a core's cache. Rows do not depend on each other, so the
bits are torch's.
"""

import torch
from torch import Tensor

_aten = torch.ops.aten

_BLOCK_BYTES = 1 << 20


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
) -> Tensor:
    """The gradient by logits with the log-softmax ``log_probabilities`` [rows, classes].

    The arguments are those of ``nll_loss_backward``. ``out`` receives the result, and may be the memory of
    ``log_probabilities``. Code under ``torch.compile`` does not write into arguments, since it may be called
    twice.
    """
    others = weight, reduction, ignore_index, total_weight
    if torch.compiler.is_compiling():
        terms: Tensor = _aten.nll_loss_backward(grad, log_probabilities, target, *others)
        made: Tensor = _aten._log_softmax_backward_data(terms, log_probabilities, 1, terms.dtype)
        return made
    out = torch.empty_like(log_probabilities) if out is None else out
    num_rows, num_classes = log_probabilities.shape
    step = rows_per_block(num_classes, log_probabilities.itemsize)
    terms = torch.empty_like(log_probabilities[:step])
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        block = log_probabilities[rows]
        part = terms[: len(block)]
        row_grad = grad[rows] if grad.dim() else grad
        _aten.nll_loss_backward.grad_input(row_grad, block, target[rows], *others, grad_input=part)
        _aten._log_softmax_backward_data.out(part, block, 1, block.dtype, out=out[rows])
    return out
