"""Packs the values of a link into messages, after checking them against the plan."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from pipec.errors import ExecutionError
from pipec.ir import Link, Sizes
from pipec.ir.text_format import format_link
from pipec.runtime.messages.connections import MAX_IN_TRANSIT
from pipec.runtime.messages.message_buffers import MessageMemory
from pipec.runtime.messages.message_layout import MessageLayout, MessageLayouts


class MessagePacker:
    """Packs the messages of a link to a peer; at most ``MAX_IN_TRANSIT`` may be in transit."""

    def __init__(self, link: Link, device: torch.device) -> None:
        self._link, self._message_layouts, self._device = link, MessageLayouts(link), device
        self._pack_buffers = deque(PackBuffer(self._memory(0)) for _ in range(MAX_IN_TRANSIT + 1))

    def messages(self, tensors: Sequence[Tensor], sizes: Sizes) -> list[Tensor]:
        """The messages of the link, with shapes evaluated with ``sizes``.

        Raises:
            ExecutionError: a value has another dtype or shape than the receiver expects.
        """
        message_layouts = self._message_layouts.of(sizes)
        check_values(self._link, message_layouts, tensors)
        return [
            self._message(message_layout, tensors)
            for message_layout in message_layouts
            if message_layout.num_bytes
        ]

    def _message(self, message_layout: MessageLayout, tensors: Sequence[Tensor]) -> Tensor:
        """One message. Lazily conjugated or negated tensors are materialized."""
        if message_layout.is_single_value:
            return tensors[message_layout.values[0].number].resolve_conj().resolve_neg().contiguous()
        pack_buffer = self._pack_buffers.popleft()
        if pack_buffer.memory.num_bytes < message_layout.num_bytes:
            pack_buffer = PackBuffer(self._memory(message_layout.num_bytes))
        self._pack_buffers.append(pack_buffer)
        pack_buffer.pack(message_layout, tensors)
        return pack_buffer.memory.message(message_layout)

    def _memory(self, num_bytes: int) -> MessageMemory:
        return MessageMemory(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))


class PackBuffer:
    """Memory in which the values of a message are packed, reused by later messages."""

    def __init__(self, memory: MessageMemory) -> None:
        self.memory, self._message_layout = memory, MessageLayout((), 0)
        self._values: Sequence[Tensor] = ()

    def pack(self, message_layout: MessageLayout, tensors: Sequence[Tensor]) -> None:
        """Copy the values of a message into the memory."""
        if message_layout is not self._message_layout:
            self._message_layout, self._values = message_layout, self.memory.values(message_layout)
        for place, value in zip(message_layout.values, self._values, strict=True):
            value.copy_(tensors[place.number])


def check_values(link: Link, message_layouts: Sequence[MessageLayout], tensors: Sequence[Tensor]) -> None:
    """Check that the values of a link have the dtypes and shapes that its receiver expects.

    Raises:
        ExecutionError: a value differs.
    """
    for message_layout in message_layouts:
        for place in message_layout.values:
            if not place.matches(tensor := tensors[place.number]):
                raise ExecutionError(
                    f"{format_link(link)}: {link.values[place.number].name} is a tensor of "
                    f"{tensor.dtype} with shape {tuple(tensor.shape)}, but the plan has {place.dtype} "
                    f"with shape {place.shape}: an operator returns another result than when the model was "
                    "captured; check the fake implementations of custom operators"
                )
