"""Operators that stand in a captured graph for what a microbatch cannot compute by itself.

They are put in before differentiation, and ``of_batch`` takes them out after it. Nothing ever runs them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

_library = torch.library.Library("pipec", "DEF")
_library.define("of_batch(Tensor of_microbatch, bool adds_up) -> Tensor")
_library.define("share(Device device) -> Tensor")
_library.define("row_numbers(Tensor of_microbatch) -> Tensor")

_library.define("result(Tensor result, str unclear, int[] axis=[]) -> Tensor")
_library.define("expect(Tensor condition, str what) -> ()")

OF_BATCH = torch.ops.pipec.of_batch.default
"""What the operators before it would compute from the whole mini-batch.

If it ``adds_up``, that is the sum of what they compute from its parts, however the rows are divided.
"""

SHARE = torch.ops.pipec.share.default
"""The rows of the microbatch as a share of those of the mini-batch."""

ROW_NUMBERS = torch.ops.pipec.row_numbers.default
"""The numbers of rows, counted from the first row of the mini-batch instead of the microbatch's."""

EXPECT = torch.ops.pipec.expect.default
"""Fails unless the condition holds of the microbatch. Stages have ``primitives.require`` in its place."""

fx.node.has_side_effect(EXPECT)  # nothing reads it, and it must not be removed for that

RESULT = torch.ops.pipec.result.default
"""A result of which the mini-batch's is the sum over microbatches, unless a call makes it ``unclear``.

With an ``axis`` it has the rows of the batch there instead: the fields of a ``BatchAxis``.
"""


@torch.library.register_fake("pipec::of_batch", lib=_library)  # type: ignore[untyped-decorator]
def _like(value: Tensor, adds_up: bool) -> Tensor:
    return torch.empty_like(value)


@torch.library.register_fake("pipec::row_numbers", lib=_library)  # type: ignore[untyped-decorator]
def _numbers(numbers: Tensor) -> Tensor:
    return torch.empty_like(numbers)


@torch.library.register_fake("pipec::share", lib=_library)  # type: ignore[untyped-decorator]
def _share(device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=device)


@torch.library.register_fake("pipec::result", lib=_library)  # type: ignore[untyped-decorator]
def _result(result: Tensor, unclear: str, axis: Sequence[int] = ()) -> Tensor:
    return torch.empty_like(result)


@torch.library.register_fake("pipec::expect", lib=_library)  # type: ignore[untyped-decorator]
def _expect(condition: Tensor, what: str) -> None:
    pass
