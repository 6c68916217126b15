"""The losses of ``torch.ctc_loss``, one for each row, for lengths in tensors.

torch's own operator saves a table for its backward, whose size depends on the values of the lengths, and so
is not traced. Here the backward computes the losses again.
"""

from typing import Any

import torch
from torch import Tensor

_INPUTS = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
    "int blank, bool zero_infinity"
)

torch.library.define("pipec::ctc_loss", f"({_INPUTS}) -> Tensor")
torch.library.define("pipec::ctc_loss_backward", f"(Tensor grad, {_INPUTS}) -> Tensor")

CTC_LOSS = torch.ops.pipec.ctc_loss.default
"""The loss of each row, for logarithms of shape (length, rows, classes)."""

CTC_LOSS_BACKWARD = torch.ops.pipec.ctc_loss_backward.default
"""The gradient of the logarithms."""

_NONE, _MEAN, _SUM = range(3)
"""ATen's numbers for reductions."""


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: str | int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """What ``torch.ctc_loss`` or ``torch.nn.functional.ctc_loss`` returns."""
    losses: Tensor = CTC_LOSS(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    if reduction in ("mean", _MEAN):
        return torch.mean(torch.div(losses, torch.clamp_min(target_lengths, 1)))
    return torch.sum(losses) if reduction in ("sum", _SUM) else losses


def _losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    return torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, _NONE, zero_infinity)


def _like_losses(log_probs: Tensor, *others: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1:-1])


def _losses_backward(grad: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    given = log_probs.detach().requires_grad_()
    with torch.enable_grad():
        losses = _losses(given, *others)
    return torch.autograd.grad(losses, given, grad)[0]


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    made = CTC_LOSS_BACKWARD(gradient, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return made, None, None, None, None, None


for _name, _computes, _fake in (
    ("ctc_loss", _losses, _like_losses),
    ("ctc_loss_backward", _losses_backward, lambda grad, given, *others: torch.empty_like(given)),
):
    torch.library.impl(f"pipec::{_name}", "default", _computes)
    torch.library.register_fake(f"pipec::{_name}", _fake)

torch.library.register_autograd("pipec::ctc_loss", _gradient, setup_context=_keep_inputs)
for _device in ("cpu", "cuda"):
    torch.library.register_autocast("pipec::ctc_loss", _device, torch.float32)  # as torch.ctc_loss
