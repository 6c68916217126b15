"""Gradients with few nonzero rows: of embedding tables, of which a microbatch reads few rows."""

from typing import NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten


class RowSparseGradient(NamedTuple):
    """The rows of a gradient that are not zeros: ``values[i]`` is row ``numbers[i]``, each of them once."""

    numbers: Tensor
    values: Tensor

    def add_to(self, total: Tensor, factor: float) -> None:
        """Add them, times ``factor``. No other row is read or written."""
        total.index_add_(0, self.numbers, self.values, alpha=factor)


def embedding_row_gradient(
    gradient: Tensor, indices: Tensor, num_rows: int, padding_index: int, scale_grad_by_freq: bool
) -> RowSparseGradient | Tensor:
    """The gradient of an embedding's table, as ``aten.embedding_dense_backward`` computes its rows.

    GPUs would wait for the number of rows, and ``torch.compile`` needs to know it: both get the whole table.
    """
    if gradient.is_cuda or torch.compiler.is_compiling():
        whole: Tensor = _aten.embedding_dense_backward(
            gradient, indices, num_rows, padding_index, scale_grad_by_freq
        )
        return whole
    if padding_index >= 0:
        is_read = indices != padding_index
        gradient, indices = gradient[is_read], indices[is_read]
    numbers, places = torch.unique(indices, return_inverse=True)
    values = _aten.embedding_dense_backward(gradient, places, len(numbers), -1, scale_grad_by_freq)
    return RowSparseGradient(numbers, values)
