"""Placeholder operators for values that a microbatch cannot compute by itself.

They are inserted before differentiation, and removed after it. Stages never run them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

_library = torch.library.Library("pipec", "DEF")
_library.define("batch_counts(Tensor of_microbatch, bool is_sum) -> Tensor")
_library.define("batch_fraction(Device device) -> Tensor")
_library.define("output_merge(Tensor result, str unproven, int[] axis=[]) -> Tensor")
_library.define("require(Tensor condition, str what) -> ()")
_library.define("tail_input(Tensor rows) -> Tensor")
_library.define("tail_gradient(Tensor gradient) -> Tensor")
_library.define("loss_outside(Tensor output, int position) -> Tensor")
_library.define("output_gradient(Tensor gradient, Tensor output, int position) -> Tensor")

BATCH_COUNT = torch.ops.pipec.batch_counts.default
"""What the operators before it would compute from the whole mini-batch.

If it ``is_sum``, that is the sum of what they compute from its parts, however the rows are divided.
"""

BATCH_FRACTION = torch.ops.pipec.batch_fraction.default
"""The rows of the microbatch as a share of those of the mini-batch."""

REQUIRE = torch.ops.pipec.require.default
"""Fails unless the condition holds of the microbatch. Stages have ``primitives.require`` in its place."""

fx.node.has_side_effect(REQUIRE)  # nothing reads it, and it must not be removed for that

OUTPUT_MERGE = torch.ops.pipec.output_merge.default
"""A result of which the mini-batch's is the sum over microbatches, unless a call makes it ``unproven``.

With an ``axis`` it has the rows of the batch there instead: the fields of a ``BatchAxis``.
"""

IN_TAIL = "pipec_tail"
"""Key in ``node.meta["custom"]`` of nodes of the tail, which their backward inherits."""

TAIL_INPUT = torch.ops.pipec.tail_input.default
"""The rows of all microbatches of a value, which the tail reads. The pass ``extract_tail`` removes it."""

TAIL_GRADIENT = torch.ops.pipec.tail_gradient.default
"""The gradient of a ``TAIL_INPUT``: the microbatch's rows of what the tail computes."""

_library.impl("tail_input", torch.clone, "CompositeExplicitAutograd")
_library.impl("tail_gradient", torch.clone, "CompositeExplicitAutograd")


LOSS_OUTSIDE = torch.ops.pipec.loss_outside.default
"""The term of an output in the loss that the script computes.

It stands for any function of all rows, whose gradient is an ``OUTPUT_GRADIENT``. Where it runs, as in the
check of a first step, it is one whose gradient has another value for each element.
"""

OUTPUT_GRADIENT = torch.ops.pipec.output_gradient.default
"""The gradient of the output at ``position`` among the results, which the script gives."""


def _weights(output: Tensor) -> Tensor:
    numbers = torch.arange(output.numel(), device=output.device, dtype=torch.float64)
    return numbers.cos().to(output.dtype).view(output.shape) / max(output.numel(), 1)


def _loss_outside(output: Tensor, position: int) -> Tensor:
    finite = output.nan_to_num(0.0, 0.0, 0.0)
    return (_weights(output) * (finite + finite * finite / 2)).sum()


def _output_gradient(gradient: Tensor, output: Tensor, position: int) -> Tensor:
    finite = output.nan_to_num(0.0, 0.0, 0.0)
    return gradient * _weights(output) * (1 + finite) * output.isfinite()


_library.impl("loss_outside", _loss_outside, "CompositeExplicitAutograd")
_library.impl("output_gradient", _output_gradient, "CompositeExplicitAutograd")


@torch.library.register_fake("pipec::batch_counts", lib=_library)  # type: ignore[untyped-decorator]
def _like(value: Tensor, is_sum: bool) -> Tensor:
    return torch.empty_like(value)


@torch.library.register_fake("pipec::batch_fraction", lib=_library)  # type: ignore[untyped-decorator]
def _fake_batch_fraction(device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=device)


@torch.library.register_fake("pipec::output_merge", lib=_library)  # type: ignore[untyped-decorator]
def _result(result: Tensor, unproven: str, axis: Sequence[int] = ()) -> Tensor:
    return torch.empty_like(result)


@torch.library.register_fake("pipec::tail_input", lib=_library)  # type: ignore[untyped-decorator]
@torch.library.register_fake("pipec::tail_gradient", lib=_library)  # type: ignore[untyped-decorator]
def _rows(rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape)


torch.library.register_autograd("pipec::tail_input", lambda ctx, grad: TAIL_GRADIENT(grad), lib=_library)


@torch.library.register_fake("pipec::require", lib=_library)  # type: ignore[untyped-decorator]
def _expect(condition: Tensor, what: str) -> None:
    pass


@torch.library.register_fake("pipec::loss_outside", lib=_library)  # type: ignore[untyped-decorator]
def _term(output: Tensor, position: int) -> Tensor:
    return output.new_empty(())


@torch.library.register_fake("pipec::output_gradient", lib=_library)  # type: ignore[untyped-decorator]
def _like_output(gradient: Tensor, output: Tensor, position: int) -> Tensor:
    return output.new_empty(output.shape)


def _save_output(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.position = inputs[1]


torch.library.register_autograd(
    "pipec::loss_outside",
    lambda ctx, gradient: (OUTPUT_GRADIENT(gradient, *ctx.saved_tensors, ctx.position), None),
    setup_context=_save_output,
    lib=_library,
)
