"""The dtypes and shapes of a link's values: what a sender must have, and memory for a receiver."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipec.errors import ExecutionError
from pipec.ir import Link, Sizes
from pipec.ir.text_format import evaluate_dim, format_link

Shape = tuple[int, ...]


class LinkValues:
    """The values of a link, with shapes that follow from the sizes of a microbatch."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._dtypes = [getattr(torch, value.dtype) for value in link.values]
        self._shapes: dict[int, tuple[Sizes, list[Shape]]] = {}

    def shapes(self, sizes: Sizes) -> list[Shape]:
        """The shapes for ``sizes``, which must not change afterwards; cached for the last few sizes."""
        cached = self._shapes.get(id(sizes))
        if cached is None:
            if len(self._shapes) == _MAX_SIZES:
                self._shapes.clear()
            shapes = [tuple(evaluate_dim(dim, sizes) for dim in value.shape) for value in self._link.values]
            cached = self._shapes[id(sizes)] = sizes, shapes
        return cached[1]

    def empty(self, sizes: Sizes, device: torch.device) -> list[Tensor]:
        """Memory for the values on a device."""
        return [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in zip(self.shapes(sizes), self._dtypes, strict=True)
        ]

    def check(self, tensors: Sequence[Tensor], sizes: Sizes) -> None:
        """Check that tensors have the dtypes and shapes that the receiver expects.

        Raises:
            ExecutionError: a tensor differs.
        """
        for number, (tensor, dtype, shape) in enumerate(
            zip(tensors, self._dtypes, self.shapes(sizes), strict=True)
        ):
            if tensor.dtype is not dtype or tensor.shape != shape:
                raise ExecutionError(
                    f"{format_link(self._link)}: {self._link.values[number].name} is a tensor of "
                    f"{tensor.dtype} with shape {tuple(tensor.shape)}, but the plan has {dtype} "
                    f"with shape {shape}: an operator returns another result than when the model was "
                    "captured; check the fake implementations of custom operators"
                )


def as_in_memory(tensor: Tensor) -> Tensor:
    """The tensor with its elements in order, without a lazy conjugation or negation: what is sent."""
    return tensor.resolve_conj().resolve_neg().contiguous()


_MAX_SIZES = 4
"""The most cached sizes. The microbatches of a batch have at most two."""
