"""The layout of a link's messages: small values share one message, each large value has its own.

Both ranks derive the same layouts from the link and the sizes in its shapes. Activations and gradients are
sent this way. Each weight and result has its own message: it lives longer than its message, and would keep
the memory of the others alive.
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
"""A value of more bytes has its own message.

Over gloo, copying two values of 16 to 64 KiB takes two ranks as much processor time as a second message.
"""

ALIGNMENT = 16
"""Values begin at multiples of this number of bytes: GPUs read several numbers at once."""


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
        """This value at ``start`` bytes from the beginning."""
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
        self._link, self._max_coalesced_bytes = link, max_coalesced_bytes
        self._cache: dict[int, tuple[Sizes, Sequence[MessageLayout]]] = {}

    def of(self, sizes: Sizes) -> Sequence[MessageLayout]:
        """The layouts for ``sizes``, which must not change afterwards."""
        cached = self._cache.get(id(sizes))
        if cached is None:
            if len(self._cache) == _MAX_SIZES:
                self._cache.clear()
            cached = sizes, message_layouts(self._link, sizes, self._max_coalesced_bytes)
            self._cache[id(sizes)] = cached
        return cached[1]


_MAX_SIZES = 4
"""The most cached sizes. The microbatches of a batch have at most two."""


def message_layouts(
    link: Link, sizes: Sizes, max_coalesced_bytes: float = MAX_COALESCED_BYTES
) -> list[MessageLayout]:
    """The messages of a link in the order in which they are sent, for shapes evaluated with ``sizes``.

    Values of more than ``max_coalesced_bytes`` have their own messages. For values of 12, 4 and 200,000
    bytes::

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
    return [_coalesced(small), *large] if small else large


def _place(number: int, value: Value, sizes: Sizes) -> ValueLayout:
    shape = tuple(evaluate_dim(dim, sizes) for dim in value.shape)
    inner = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    strides = tuple(inner)[::-1] if shape else ()
    return ValueLayout(number, getattr(torch, value.dtype), shape, strides)


def _coalesced(places: Sequence[ValueLayout]) -> MessageLayout:
    starts, end = [], 0
    for place in places:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + place.num_bytes
    return MessageLayout(tuple(map(ValueLayout.at, places, starts)), end)
