"""Messages between ranks of one process as those of several have them, while memory is measured.

Ranks of one process hand tensors over by reference. That is nobody's memory in particular: so as long as a
meter counts, a message is copied into a buffer of its reader's, and its sender keeps it as gloo does.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from pipec.ir import Instruction, Sizes
from pipec.runtime.memory.meter import current_meter, uncounted
from pipec.runtime.messages.buffers import Buffer, Memory, buffers_for, values_in
from pipec.runtime.messages.connections import MOST_UNDER_WAY
from pipec.runtime.messages.parcels import Parcel, Parcels

Send = Callable[[Sequence[Tensor], Sizes], None]


class Mailbox(Protocol):
    """The messages of one link for one rank."""

    def post(self, sizes: Sizes) -> None: ...

    def wait(self) -> Sequence[Tensor]: ...


def sending(send: Send, key: object) -> Send:
    """``send``, which keeps what it has sent of a link to a peer if that is measured."""

    def send_apart(tensors: Sequence[Tensor], sizes: Sizes) -> None:
        if meter := current_meter():
            under_way = meter.kept.setdefault(key, deque(maxlen=MOST_UNDER_WAY))
            under_way.append([tensor.contiguous() for tensor in tensors])
            with uncounted():
                tensors = [tensor.clone() for tensor in tensors]
        send(tensors, sizes)

    return send_apart


class Inbox:
    """A receive instruction, whose messages arrive in ``mailbox``."""

    def __init__(self, mailbox: Mailbox, instruction: Instruction, device: torch.device) -> None:
        assert instruction.link is not None
        self._mailbox = mailbox
        self._key = instruction.link, instruction.peer, instruction.slot
        self._make = functools.partial(buffers_for, instruction, device)
        self._parcels = Parcels(instruction.link)
        self._into: Sequence[Tensor] = ()
        self._sizes: Sizes | None = None

    def held(self) -> list[Tensor]:
        """The memory that would have stayed since the last message, while a meter counts."""
        if self._sizes is None or not current_meter():
            return []
        with uncounted():
            self._memory(self._sizes)
        return [memory for buffer in self._buffers() for memory in buffer.held()]

    def post(self, sizes: Sizes) -> None:
        self._mailbox.post(sizes)
        self._sizes = sizes
        if current_meter():
            self._into = values_in(self._memory(sizes))

    def wait(self) -> Sequence[Tensor]:
        arrived = self._mailbox.wait()
        into, self._into = self._into, ()
        return [own.copy_(tensor) for own, tensor in zip(into, arrived, strict=True)] if into else arrived

    def _buffers(self) -> Sequence[Buffer]:
        """Those of the slot, for as long as the meter counts."""
        meter = current_meter()
        assert meter is not None, "messages have no memory of their own unless it is measured"
        if self._key not in meter.kept:
            meter.kept[self._key] = self._make()
        return cast("Sequence[Buffer]", meter.kept[self._key])

    def _memory(self, sizes: Sizes) -> list[tuple[Parcel, Memory]]:
        filled = zip(self._parcels.of(sizes), self._buffers(), strict=False)
        return [(parcel, buffer.memory(parcel.num_bytes)) for parcel, buffer in filled]
