"""The global norm of gradients that are distributed over ranks, and the factor that clips them."""

from collections.abc import Iterable, Sequence
from itertools import chain, islice

import torch
from torch import Tensor

from pipec.runtime.messages.call_description import flat_memory


@torch.no_grad()
def gradient_norms(gradients: Iterable[Tensor], exactly: bool = True) -> list[Tensor]:
    """The norms of gradients, or of pieces of them, as float64, on their devices.

    If ``exactly``, they are computed in float64, so that their sum of squares hardly depends on how elements
    are distributed over ranks. (A float32 norm of a million elements is off by 1e-5 on a CPU.) Where torch
    makes a copy in float64 to do so, it is one of ``_CHUNK`` elements. Otherwise they are computed in the
    gradients' dtype, in a tenth of the time: enough to see whether all elements are finite, but a norm may
    overflow although they are.
    """
    values = [stored_values(each) for each in gradients]
    if not exactly:
        return [torch.linalg.vector_norm(each).double() for each in values]
    chunks = [flat_memory(each).split(_CHUNK) for each in values]
    each_chunk = list(chain.from_iterable(chunks))
    norms = iter(torch._foreach_norm(each_chunk, 2, torch.float64)) if each_chunk else iter(())
    return [_norm_of_norms(list(islice(norms, len(own)))) for own in chunks]


_CHUNK = 2**20


def _norm_of_norms(norms: Sequence[Tensor]) -> Tensor:
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack([*norms]))


def sum_of_squares(gradients: Iterable[Tensor]) -> Tensor:
    """The squared norm of all these gradients, which are on one device."""
    norms = gradient_norms(gradients)
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


def clip_factor(sum_of_squares: Tensor, max_norm: float) -> Tensor:
    """The factor, 1 at most, by which ``torch.nn.utils.clip_grad_norm_`` multiplies every gradient."""
    return torch.clamp(max_norm / (sum_of_squares.sqrt() + 1e-6), max=1.0)


def stored_values(gradient: Tensor) -> Tensor:
    """The stored real numbers of a gradient, which may be sparse or complex."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.view_as_real(values) if values.is_complex() else values
