"""Copies in-process messages while memory is measured, so that one process holds what several would.

Ranks of one process pass tensors by reference, so a message's memory belongs to no particular rank. While a
meter counts, a message is copied into a buffer of its reader, and its sender keeps it as gloo does.
"""

import functools
import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Protocol, cast

import torch
from torch import Tensor

from pipec.ir import Instruction, Link, Payload, Sizes, Value
from pipec.ir.text_format import evaluate_dim
from pipec.runtime.memory.meter import current_memory_meter, uncounted
from pipec.runtime.messages.connections import MAX_IN_TRANSIT, Work
from pipec.torch_compat.run_time import storage_use_count

Send = Callable[[Sequence[Tensor], Sizes], None]


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


class MessageMemory:
    """Memory for messages of up to the bytes of ``whole``.

    Its tensors are made once: with a cold cache, making one takes half as long as sending it.
    """

    def __init__(self, whole: Tensor) -> None:
        self.num_bytes = whole.numel()
        self.whole = whole
        self._views = {torch.uint8: whole}
        self._message_key, self._message = (torch.uint8, 0), whole[:0]
        self._prepared: tuple[MessageLayout, list[Tensor]] | None = None
        self._storage = whole.untyped_storage()
        self._own_count = self._count()

    @property
    def is_free(self) -> bool:
        """Whether no value uses it, and no transfer is in progress."""
        return self._count() == self._own_count

    def message(self, message_layout: MessageLayout) -> Tensor:
        """The tensor that is sent or received."""
        key = message_layout.dtype, message_layout.num_bytes
        if key != self._message_key:
            dtype, num_bytes = self._message_key = key
            self._message = self._viewed(dtype)[: num_bytes // dtype.itemsize]
        return self._message

    def prepare(self, message_layout: MessageLayout) -> None:
        """Make the tensors of an expected message in advance; until then the memory counts as in use."""
        if self.num_bytes >= message_layout.num_bytes and (
            self._prepared is None or self._prepared[0] is not message_layout
        ):
            self._prepared = message_layout, self._made(message_layout)

    def values(self, message_layout: MessageLayout) -> list[Tensor]:
        """The values of the message, in the order of its layout."""
        prepared, self._prepared = self._prepared, None
        return prepared[1] if prepared and prepared[0] is message_layout else self._made(message_layout)

    def _made(self, message_layout: MessageLayout) -> list[Tensor]:
        return [
            self._viewed(place.dtype).as_strided(place.shape, place.strides, place.start)
            for place in message_layout.values
        ]

    def _viewed(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._views:
            whole_numbers = self.num_bytes // dtype.itemsize * dtype.itemsize
            self._views[dtype] = self.whole[:whole_numbers].view(dtype)
            self._own_count += 1
        return self._views[dtype]

    def _count(self) -> int:
        return storage_use_count(self._storage)


class ReceiveBuffer:
    """Memory for one message, reused once no value of the previous message is in use.

    Unless it ``stays``, the values alone own the memory, as for results. ``pending`` is the message that
    fills it; after the device has waited for the message, it is ``unsynchronized`` until the host has too.
    """

    def __init__(self, device: torch.device, stays: bool) -> None:
        self._device, self._stays = device, stays
        self._memory: MessageMemory | None = None
        self.pending: Work | None = None
        self.unsynchronized: Work | None = None

    def held(self) -> list[Tensor]:
        """The memory that stays."""
        return [self._memory.whole] if self._memory else []

    def memory(self, num_bytes: int) -> MessageMemory:
        """Memory of at least ``num_bytes``, with undefined contents."""
        memory = self._memory
        if memory is None or memory.num_bytes < num_bytes or not memory.is_free:
            memory = MessageMemory(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))
        if self._stays:
            self._memory = memory
        return memory


def make_receive_buffers(instruction: Instruction, device: torch.device) -> list[ReceiveBuffer]:
    """A buffer for each message that a receive instruction may have."""
    assert instruction.link is not None
    stays = instruction.slot >= 0 or instruction.link.payload is Payload.WEIGHT
    return [ReceiveBuffer(device, stays) for _ in instruction.link.values]


def link_values(messages: Sequence[tuple[MessageLayout, MessageMemory]]) -> list[Tensor]:
    """The values of a link in its order, from the memory of its messages."""
    numbered = [
        (place.number, value)
        for message_layout, memory in messages
        for place, value in zip(message_layout.values, memory.values(message_layout), strict=True)
    ]
    return [value for _, value in sorted(numbered, key=itemgetter(0))]


class Mailbox(Protocol):
    """The messages of one link for one rank, by number."""

    def post(self, sizes: Sizes) -> int: ...

    def wait(self, number: int) -> Sequence[Tensor]: ...


def metered_send(send: Send, key: object) -> Send:
    """``send``, which also keeps sent messages alive while memory is measured, as gloo does."""

    def metered(tensors: Sequence[Tensor], sizes: Sizes) -> None:
        if meter := current_memory_meter():
            in_transit = meter.kept.setdefault(key, deque(maxlen=MAX_IN_TRANSIT))
            in_transit.append([tensor.contiguous() for tensor in tensors])
            with uncounted():
                tensors = [tensor.clone() for tensor in tensors]
        send(tensors, sizes)

    return metered


class MeteredReceiver:
    """A receive instruction whose messages arrive in ``mailbox``."""

    def __init__(self, mailbox: Mailbox, instruction: Instruction, device: torch.device) -> None:
        assert instruction.link is not None
        self._mailbox = mailbox
        self._key = instruction.link, instruction.peer, instruction.slot
        self._make = functools.partial(make_receive_buffers, instruction, device)
        self._message_layouts = MessageLayouts(instruction.link)
        self._into: Sequence[Tensor] = ()
        self._sizes: Sizes | None = None
        self._number = 0

    def held(self) -> list[Tensor]:
        """The buffers that a process would hold since the last message, while a meter counts."""
        if self._sizes is None or not current_memory_meter():
            return []
        with uncounted():
            self._memory(self._sizes)
        return [memory for buffer in self._buffers() for memory in buffer.held()]

    def post(self, sizes: Sizes) -> None:
        self._number, self._sizes = self._mailbox.post(sizes), sizes
        if current_memory_meter():
            self._into = link_values(self._memory(sizes))

    def wait(self) -> Sequence[Tensor]:
        arrived = self._mailbox.wait(self._number)
        into, self._into = self._into, ()
        return [own.copy_(tensor) for own, tensor in zip(into, arrived, strict=True)] if into else arrived

    def _buffers(self) -> Sequence[ReceiveBuffer]:
        """The buffers of the slot, while the meter counts."""
        meter = current_memory_meter()
        assert meter is not None, "messages have no memory of their own unless it is measured"
        if self._key not in meter.kept:
            meter.kept[self._key] = self._make()
        return cast("Sequence[ReceiveBuffer]", meter.kept[self._key])

    def _memory(self, sizes: Sizes) -> list[tuple[MessageLayout, MessageMemory]]:
        filled = zip(self._message_layouts.of(sizes), self._buffers(), strict=False)
        return [
            (message_layout, buffer.memory(message_layout.num_bytes)) for message_layout, buffer in filled
        ]
