"""The global norm of gradients that many ranks hold parts of, and the factor that clips them by it."""

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def sum_of_squares(gradients: Iterable[Tensor], exactly: bool = True) -> Tensor:
    """What these gradients, or pieces of gradients, add to the square of the global norm.

    It is a float64, so that the sum over ranks hardly depends on how elements are distributed over them. (A
    float32 norm of a million elements is off by 1e-5 on a CPU.) Where it only matters whether it is finite,
    norms in the gradients' own type take a tenth of the time. They may be infinite where no element is.
    """
    dtype = torch.float64 if exactly else None
    norms = [torch.linalg.vector_norm(values_of(each), dtype=dtype) for each in gradients]
    total = torch.zeros((), dtype=torch.float64)
    for norm in norms:
        total = total.to(norm.device) + norm.double().square()
    return total


def clip_factor(sum_of_squares: Tensor, max_norm: float) -> Tensor:
    """What ``torch.nn.utils.clip_grad_norm_`` would multiply every gradient by: 1 at most."""
    return torch.clamp(max_norm / (sum_of_squares.sqrt() + 1e-6), max=1.0)


def values_of(gradient: Tensor) -> Tensor:
    """The numbers of a gradient that may be sparse or complex."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values
