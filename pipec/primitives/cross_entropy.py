"""The gradient of cross entropy by the logits, some rows at a time.

torch makes it in two steps, through a tensor as large as the logits that is zero but for one number of each
row. Here that tensor has as many rows as stay in a core's cache, and the two steps follow each other for
these rows. Rows do not depend on each other, so that the bits are those of torch.
"""

import torch
from torch import Tensor

_aten = torch.ops.aten

_BLOCK_BYTES = 1 << 20


def rows_at_a_time(num_classes: int, itemsize: int) -> int:
    """How many rows of logits are differentiated together."""
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
    """The gradient by logits of which ``log_probabilities`` [rows, classes] are the logarithm of the softmax.

    The arguments are those of ``nll_loss_backward``. ``out`` is where the result goes, and may be the memory
    of ``log_probabilities``. What torch compiles writes into no argument, for it may be called twice.
    """
    if torch.compiler.is_compiling():
        of_nll = (target, weight, reduction, ignore_index, total_weight)
        terms: Tensor = _aten.nll_loss_backward(grad, log_probabilities, *of_nll)
        made: Tensor = _aten._log_softmax_backward_data(terms, log_probabilities, 1, terms.dtype)
        return made
    out = torch.empty_like(log_probabilities) if out is None else out
    num_rows, num_classes = log_probabilities.shape
    step = rows_at_a_time(num_classes, log_probabilities.itemsize)
    terms = log_probabilities.new_empty(min(step, num_rows), num_classes)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        block = log_probabilities[rows]
        part = terms[: len(block)]
        _aten.nll_loss_backward.grad_input(
            grad[rows] if grad.dim() else grad,
            block,
            target[rows],
            weight,
            reduction,
            ignore_index,
            total_weight,
            grad_input=part,
        )
        _aten._log_softmax_backward_data.out(part, block, 1, block.dtype, out=out[rows])
    return out
