"""The send and receive buffers of messages between processes. They are kept from step to step."""

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from pipec.ir import Instruction, Payload
from pipec.runtime.messages.connections import Connections, Work
from pipec.runtime.messages.message_layout import MessageLayout
from pipec.torch_compat.run_time import storage_use_count


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

    def synchronize(self, connections: Connections) -> None:
        """Wait until no message uses the memory."""
        if self.unsynchronized is not None:
            connections.synchronize(self.unsynchronized)
            self.unsynchronized = None

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
