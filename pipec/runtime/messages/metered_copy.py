"""Copies in-process messages while memory is measured, so that one process holds what several would.

Ranks of one process pass tensors by reference, so a message's memory belongs to no particular rank. While a
meter counts, a message is copied into a buffer of its reader, and its sender keeps it as gloo does.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from pipec.ir import Instruction, Sizes
from pipec.runtime.memory.meter import current_memory_meter, uncounted
from pipec.runtime.messages.connections import MAX_IN_TRANSIT
from pipec.runtime.messages.message_buffers import (
    MessageMemory,
    ReceiveBuffer,
    link_values,
    make_receive_buffers,
)
from pipec.runtime.messages.message_layout import MessageLayout, MessageLayouts

Send = Callable[[Sequence[Tensor], Sizes], None]


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
