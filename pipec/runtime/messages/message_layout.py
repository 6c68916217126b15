"""How the values of a link travel: small ones together in one message, each large one in its own.

Both ranks derive the same layouts from the link and the sizes in its shapes. Activations and gradients are
sent this way. Weights and results have messages of their own: they live longer than their message, and any of
them would keep the memory of all.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pipec.ir import Link, Sizes, Value
from pipec.ir.text_format import evaluate_dim

MAX_COALESCED_BYTES = 1 << 14
"""A value of more bytes has a message of its own.

Over gloo, two ranks take as much processor time to copy two values of 16 to 64 KiB as for a second message.
"""

ALIGNMENT = 16
"""Values begin at multiples of so many bytes, since GPUs read several numbers at once."""


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """The place of value ``number`` of a link in its message: ``start`` counts elements of its dtype."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def matches(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has this dtype, shape and strides."""
        return tensor.shape == self.shape and tensor.dtype is self.dtype

    def at(self, start: int) -> "ValueLayout":
        """The same at a number of bytes from the beginning."""
        return replace(self, start=start // self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The layout of a message. An empty message is not sent."""

    values: tuple[ValueLayout, ...]
    num_bytes: int

    @property
    def is_single_value(self) -> bool:
        """Whether the message is one value, which needs no copy."""
        return len(self.values) == 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the message: several values are sent as bytes."""
        return self.values[0].dtype if self.is_single_value else torch.uint8


class MessageLayouts:
    """The layouts of a link, cached for the last few sizes."""

    def __init__(self, link: Link, max_coalesced_bytes: float = MAX_COALESCED_BYTES) -> None:
        self._link, self._most_together = link, max_coalesced_bytes
        self._found: dict[int, tuple[Sizes, Sequence[MessageLayout]]] = {}

    def of(self, sizes: Sizes) -> Sequence[MessageLayout]:
        """The layouts for ``sizes``, which nobody changes afterwards."""
        found = self._found.get(id(sizes))
        if found is None:
            if len(self._found) == _MOST_SIZES:
                self._found.clear()
            found = self._found[id(sizes)] = sizes, message_layouts(self._link, sizes, self._most_together)
        return found[1]


_MOST_SIZES = 4
"""Microbatches of a batch have two at most."""


def message_layouts(
    link: Link, sizes: Sizes, max_coalesced_bytes: float = MAX_COALESCED_BYTES
) -> list[MessageLayout]:
    """The messages of a link in the order in which they are sent, for shapes whose names stand for ``sizes``.

    Values of more than ``max_coalesced_bytes`` bytes have messages of their own. Of 12, 4 and 200,000 bytes::

        message 0 (20 bytes): value 0 at 0, value 1 at 16
        message 1 (200,000 bytes): value 2
    """
    places = [_place(number, value, sizes) for number, value in enumerate(link.values)]
    small = [
        place for place in places if link.payload.feeds_compute and place.num_bytes <= max_coalesced_bytes
    ]
    if len(small) < 2:
        small = []
    large = [MessageLayout((place,), place.num_bytes) for place in places if place not in small]
    return [_together(small), *large] if small else large


def _place(number: int, value: Value, sizes: Sizes) -> ValueLayout:
    shape = tuple(evaluate_dim(dim, sizes) for dim in value.shape)
    inner = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    strides = tuple(inner)[::-1] if shape else ()
    return ValueLayout(number, getattr(torch, value.dtype), shape, strides)


def _together(places: Sequence[ValueLayout]) -> MessageLayout:
    starts, end = [], 0
    for place in places:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + place.num_bytes
    return MessageLayout(tuple(map(ValueLayout.at, places, starts)), end)
