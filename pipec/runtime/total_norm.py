"""Replaces what computes torch's norm of gradients, for all who have imported torch's functions."""

import functools
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, cast

from torch import Tensor
from torch.nn.utils.clip_grad import _get_total_norm


def replace_total_norm(norm_of: Callable[[Sequence[Tensor], float], Tensor | None]) -> None:
    """Let ``get_total_norm`` and ``clip_grad_norm_`` take the norm that ``norm_of`` gives, unless it is None.

    Torch's function runs another one in ``torch.no_grad``, which is replaced: so the module that has
    imported the function by name before gets the other norm, too.
    """
    outer = cast(FunctionType, _get_total_norm)
    cells = dict(zip(outer.__code__.co_freevars, outer.__closure__ or (), strict=True))
    plain: Callable[..., Tensor] = cells["func"].cell_contents

    @functools.wraps(plain)
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm = norm_of(listed, float(norm_type))
        if norm is None:
            return plain(listed, norm_type, error_if_nonfinite, foreach)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
                "cannot be clipped. To disable this error and scale the gradients by the non-finite norm "
                "anyway, set `error_if_nonfinite=False`"
            )
        return norm

    cells["func"].cell_contents = total_norm
