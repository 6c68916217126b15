"""``torch.nn.functional.interpolate`` as one operator, with eager torch's kernels.

torch decomposes it before it differentiates, into up to 230 operators that round in another way.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_OPTIONS = "float[]? scale_factor, str mode, bool align_corners, bool recompute_scale_factor"

torch.library.define("pipec::interpolate", f"(Tensor x, SymInt[]? size, {_OPTIONS}) -> Tensor")
torch.library.define("pipec::interpolate_backward", f"(Tensor grad, SymInt[] shape, {_OPTIONS}) -> Tensor")

INTERPOLATE = torch.ops.pipec.interpolate.default
"""Images of another size. ``size`` and ``scale_factor`` have a number for each dimension of an image."""

INTERPOLATE_BACKWARD = torch.ops.pipec.interpolate_backward.default
"""The gradient of the images, which have this shape."""

INTERPOLATED_DIMENSIONS = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}
"""The modes that torch decomposes, each with the dimensions of its images."""


def _interpolate(
    x: Tensor,
    size: Sequence[int] | None,
    scale_factor: Sequence[float] | None,
    mode: str,
    align_corners: bool,
    recompute_scale_factor: bool,
) -> Tensor:
    return F.interpolate(x, size, scale_factor, mode, align_corners, recompute_scale_factor or None)


def _like_interpolate(
    x: Tensor,
    size: Sequence[int] | None,
    scale_factor: Sequence[float] | None,
    mode: str,
    align_corners: bool,
    recompute_scale_factor: bool,
) -> Tensor:
    nearest = F.interpolate(x, size, scale_factor, recompute_scale_factor=recompute_scale_factor or None)
    return _resized(x, nearest.shape, mode)


def _resized(x: Tensor, shape: Sequence[int], mode: str) -> Tensor:
    """A fake tensor of ``shape``, laid out as an interpolation of ``x`` is."""
    operator = getattr(torch.ops.aten, f"upsample_{mode}{INTERPOLATED_DIMENSIONS[mode]}d")
    made: Tensor = operator(x, shape[2:], False)
    return made


def _interpolate_backward(
    grad: Tensor,
    shape: Sequence[int],
    scale_factor: Sequence[float] | None,
    mode: str,
    align_corners: bool,
    recompute_scale_factor: bool,
) -> Tensor:
    operator = getattr(torch.ops.aten, f"upsample_{mode}{INTERPOLATED_DIMENSIONS[mode]}d_backward")
    scales = () if scale_factor is None or recompute_scale_factor else scale_factor
    made: Tensor = operator(grad, grad.shape[2:], shape, align_corners, *scales)
    return made


def _like_interpolate_backward(
    grad: Tensor, shape: Sequence[int], scale_factor: Sequence[float] | None, mode: str, *others: Any
) -> Tensor:
    return _resized(grad, shape, mode)


def _keep_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, *ctx.options = inputs
    ctx.shape = x.shape


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return INTERPOLATE_BACKWARD(gradient, ctx.shape, *ctx.options), None, None, None, None, None


for _name, _computes, _fake in (
    ("interpolate", _interpolate, _like_interpolate),
    ("interpolate_backward", _interpolate_backward, _like_interpolate_backward),
):
    torch.library.impl(f"pipec::{_name}", "default", _computes)
    torch.library.register_fake(f"pipec::{_name}", _fake)

torch.library.register_autograd("pipec::interpolate", _gradient, setup_context=_keep_shape)
