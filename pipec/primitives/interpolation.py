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
    made = F.interpolate(x, size, scale_factor, mode, align_corners, recompute_scale_factor)
    return made.contiguous(memory_format=_memory_format(x))


def _like_interpolate(
    x: Tensor,
    size: Sequence[int] | None,
    scale_factor: Sequence[float] | None,
    mode: str,
    align_corners: bool,
    recompute_scale_factor: bool,
) -> Tensor:
    nearest = F.interpolate(x, size, scale_factor, recompute_scale_factor=recompute_scale_factor)
    return torch.empty_like(nearest, memory_format=_memory_format(x))


def _memory_format(x: Tensor) -> torch.memory_format:
    """The layout of ``x``, which its interpolation has too; the one of torch may depend on sizes of one."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    is_last = x.stride() == torch.empty(x.shape, device="meta", memory_format=last).stride()
    return last if is_last else torch.contiguous_format


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
    return made.contiguous(memory_format=_memory_format(grad))


def _like_interpolate_backward(grad: Tensor, shape: Sequence[int], *others: Any) -> Tensor:
    return torch.empty_like(grad.new_empty(shape), memory_format=_memory_format(grad))


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
