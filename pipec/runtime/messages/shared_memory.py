"""Messages between ranks of one host, through shared memory.

Each direction has a socket. The sender copies the values of a message into a *slot*, a file in memory, and
announces it on the socket; the slot's first announcement carries the file. The receiver blocks until an
announcement arrives, and reads the values in place. When it posts a later receive, it sends a post on the
same socket, which returns the slot of the previous message::

    sender                                   receiver
                                        <--  post
    copy into slot 0, announce it       -->  wait; reads the values in slot 0
    copy into slot 1, announce it       <--  post, slot 0 is free
    copy into slot 0, announce it       -->  wait; reads the values in slot 1

As with gloo, a sender waits only if the last two messages of the link have not been posted. So there are two
more slots than the receiver holds. No file has a name that could outlive the processes.
"""

import contextlib
import itertools
import math
import mmap
import os
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipec.errors import TransportError
from pipec.ir import Instruction, Link, Sizes
from pipec.runtime.messages.connections import MAX_IN_TRANSIT, Direction
from pipec.runtime.messages.host_sockets import AllGatherText, connect, shared_file
from pipec.runtime.messages.message_buffers import MessageMemory
from pipec.runtime.messages.message_layout import MessageLayout, MessageLayouts
from pipec.runtime.messages.message_packing import PackBuffer, check_values
from pipec.runtime.messages.message_socket import MessageSocket

_ANNOUNCEMENT = struct.Struct("=qqqq")
"""The tag, the slot, the message's bytes, and a slot that this one replaces, or -1."""

_POST = struct.Struct("=qq?")
"""The tag, the slot of an earlier message or -1, and whether it is free; else the receiver keeps it."""

_NO_SLOT = -1

ErrorContext = contextlib.AbstractContextManager[object]
"""A context for waits, which turns errors of connections into a TransportError."""


class SharedMemory:
    """One rank's messages through shared memory; ``open`` decides which peers use it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._opened = set[Direction]()
        self._outgoing: dict[int, OutgoingChannel] = {}
        self._incoming: dict[int, IncomingChannel] = {}
        self._message_layouts: dict[Link, MessageLayouts] = {}
        self._received_slots: dict[tuple[Link, int, int], ReceivedSlot] = {}

    def open(self, directions: Collection[Direction], all_gather_text: AllGatherText) -> None:
        """Connect the ranks that share memory. Every rank calls this with the same directions."""
        if new := {*directions} - self._opened:
            self._opened |= new
            outgoing, incoming = connect(self._rank, new, all_gather_text)
            self._outgoing |= {peer: OutgoingChannel(each) for peer, each in outgoing.items()}
            self._incoming |= {peer: IncomingChannel(each) for peer, each in incoming.items()}

    def sender(
        self, instruction: Instruction, tag: int, error_context: ErrorContext
    ) -> "SharedSender | None":
        """The sender of an instruction, if its peer shares memory."""
        link, outgoing = instruction.link, self._outgoing.get(instruction.peer)
        if link is None or outgoing is None or not link.payload.feeds_compute:
            return None  # weights and results outlive their microbatch, and would occupy a slot
        return SharedSender(outgoing, link, self._layouts_of(link), tag, error_context)

    def receiver(
        self, instruction: Instruction, tag: int, error_context: ErrorContext
    ) -> "SharedReceiver | None":
        """The receiver of an instruction, if its peer shares memory."""
        link, incoming = instruction.link, self._incoming.get(instruction.peer)
        if link is None or incoming is None or not link.payload.feeds_compute:
            return None
        received_slot = self._received_slots.setdefault(
            (link, instruction.peer, instruction.slot), ReceivedSlot()
        )
        return SharedReceiver(incoming, self._layouts_of(link), tag, received_slot, error_context)

    def close(self) -> None:
        """Close all sockets. Waits at either end, on any thread, raise ConnectionError."""
        for each in self._ends():
            each.socket.close()

    def _layouts_of(self, link: Link) -> MessageLayouts:
        """The layouts of a link, cached. All values share one message, because all are copied."""
        return self._message_layouts.setdefault(link, MessageLayouts(link, max_coalesced_bytes=math.inf))

    def _ends(self) -> "list[OutgoingChannel | IncomingChannel]":
        return [*self._outgoing.values(), *self._incoming.values()]


@dataclass(eq=False)
class SharedSlot:
    """A slot of a direction. It belongs to the side that was notified of it last."""

    number: int
    memory: MessageMemory


@dataclass
class ReceivedSlot:
    """The slot of the last message in a buffer slot of the program."""

    slot: SharedSlot | None = None


@dataclass
class _TagQueue:
    """The sender's state of one tag: free slots, and the number of messages not posted yet."""

    free: list["_SenderSlot"] = field(default_factory=list)
    num_ahead: int = 0


@dataclass(eq=False)
class _SenderSlot(SharedSlot):
    pack_buffer: PackBuffer


class OutgoingChannel:
    """The sender's end of a direction."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = MessageSocket(connection)
        self._tag_queues: defaultdict[int, _TagQueue] = defaultdict(_TagQueue)
        self._in_use: dict[int, _SenderSlot] = {}
        self._numbers = itertools.count()

    def send(self, message_layout: MessageLayout, tensors: Sequence[Tensor], tag: int) -> None:
        """Copy the values of a message, and announce it. Waits while two sent messages are not posted."""
        tag_queue = self._tag_queues[tag]
        while tag_queue.num_ahead == MAX_IN_TRANSIT:
            self._note(self.socket.receive(_POST.size))
        while not tag_queue.free and (post := self.socket.receive_nowait(_POST.size)):
            self._note(post)
        slot, retired, file = self._slot(tag_queue, message_layout.num_bytes)
        try:
            slot.pack_buffer.pack(message_layout, tensors)
            self.socket.send(_ANNOUNCEMENT.pack(tag, slot.number, message_layout.num_bytes, retired), file)
        finally:
            if file is not None:
                os.close(file)
        self._in_use[slot.number] = slot
        tag_queue.num_ahead += 1

    def _slot(self, tag_queue: _TagQueue, num_bytes: int) -> tuple[_SenderSlot, int, int | None]:
        """A large enough slot; if it is new, also the number of the slot it replaces, and its file.

        Prefers the slot that was freed last: its memory may be in the cache.
        """
        for slot in reversed(tag_queue.free):
            if slot.memory.num_bytes >= num_bytes:
                tag_queue.free.remove(slot)
                return slot, _NO_SLOT, None
        retired = tag_queue.free.pop(0).number if tag_queue.free else _NO_SLOT
        try:
            file = shared_file(num_bytes)
        except OSError as error:
            raise TransportError(
                f"cannot get {num_bytes:,} bytes of memory to share with another rank: {error}; free memory, "
                "or raise the limits of open files and memory"
            ) from error
        memory = _mapped(file)
        return _SenderSlot(next(self._numbers), memory, PackBuffer(memory)), retired, file

    def _note(self, post: bytes) -> None:
        """Process a post of the receiver."""
        tag, number, is_free = _POST.unpack(post)
        tag_queue = self._tag_queues[tag]
        tag_queue.num_ahead -= 1
        if number != _NO_SLOT:
            slot = self._in_use.pop(number)
            if is_free:
                tag_queue.free.append(slot)


class IncomingChannel:
    """The receiver's end of a direction."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = MessageSocket(connection)
        self._arrived: defaultdict[int, dict[int, tuple[SharedSlot, int]]] = defaultdict(dict)
        self._num_posted, self._num_arrived = Counter[int](), Counter[int]()
        self._returned: defaultdict[int, dict[int, SharedSlot]] = defaultdict(dict)
        self._holding: dict[int, SharedSlot] = {}

    def post(self, tag: int, before: SharedSlot | None) -> int:
        """Allow one more message, and send back the slot of the message ``before`` if it is free.

        Returns the number of the message among those of its tag.
        """
        is_free = before is not None and before.memory.is_free
        number = _NO_SLOT
        if before is not None:
            number = before.number
            del self._holding[number]
            if is_free:
                self._returned[tag][number] = before
        self.socket.send(_POST.pack(tag, number, is_free))
        self._num_posted[tag] += 1
        return self._num_posted[tag] - 1

    def wait(self, tag: int, number: int, message_layout: MessageLayout) -> SharedSlot:
        """Wait for a message of a tag by its number, which has this layout.

        Meanwhile it prepares the tensors of slots in which the message may arrive.
        """
        arrived = self._arrived[tag]
        if number not in arrived:
            for slot in self._returned[tag].values():
                slot.memory.prepare(message_layout)
        while number not in arrived:
            self._read()
        slot, num_bytes = arrived.pop(number)
        if num_bytes != message_layout.num_bytes:
            raise TransportError(
                f"received a message of {num_bytes:,} bytes, but the plan expects "
                f"{message_layout.num_bytes:,}: the ranks have different batches; pass the same arguments on "
                "every rank"
            )
        return slot

    def _read(self) -> None:
        message, file = self.socket.receive_file(_ANNOUNCEMENT.size)
        tag, number, num_bytes, retired = _ANNOUNCEMENT.unpack(message)
        slots = self._returned[tag]
        if retired != _NO_SLOT:
            del slots[retired]
        if file is not None:
            try:
                slots[number] = SharedSlot(number, _mapped(file))
            finally:
                os.close(file)
        slot = self._holding[number] = slots.pop(number)
        self._arrived[tag][self._num_arrived[tag]] = slot, num_bytes
        self._num_arrived[tag] += 1


def _mapped(file: int) -> MessageMemory:
    """The memory of a file, which may be closed afterwards."""
    return MessageMemory(torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8))


class SharedSender:
    """One send instruction. ``error_context`` describes its waits."""

    def __init__(
        self,
        outgoing: OutgoingChannel,
        link: Link,
        message_layouts: MessageLayouts,
        tag: int,
        error_context: ErrorContext,
    ) -> None:
        self._outgoing, self._link, self._message_layouts, self._tag = outgoing, link, message_layouts, tag
        self._error_context = error_context

    def __call__(self, tensors: Sequence[Tensor], sizes: Sizes) -> None:
        message_layouts = self._message_layouts.of(sizes)
        check_values(self._link, message_layouts, tensors)
        if message_layouts[0].num_bytes:
            with self._error_context:
                self._outgoing.send(message_layouts[0], tensors, self._tag)


class SharedReceiver:
    """One receive instruction. All receives into the same buffer slot share its ``received_slot``."""

    def __init__(
        self,
        incoming: IncomingChannel,
        message_layouts: MessageLayouts,
        tag: int,
        received_slot: ReceivedSlot,
        error_context: ErrorContext,
    ) -> None:
        self._incoming, self._message_layouts, self._tag, self._received_slot = (
            incoming,
            message_layouts,
            tag,
            received_slot,
        )
        self._error_context = error_context
        self._message_layout, self._number = MessageLayout((), 0), -1

    def post(self, sizes: Sizes) -> None:
        (self._message_layout,) = self._message_layouts.of(sizes)
        if not self._message_layout.num_bytes:
            return
        before, self._received_slot.slot = self._received_slot.slot, None
        try:
            self._number = self._incoming.post(self._tag, before)
        except ConnectionError:
            with self._error_context:  # entered only on failure, because a post does not wait
                raise

    def wait(self) -> Sequence[Tensor]:
        if not self._message_layout.num_bytes:
            return _EMPTY.values(self._message_layout)
        with self._error_context:
            slot = self._incoming.wait(self._tag, self._number, self._message_layout)
        self._received_slot.slot = slot
        return slot.memory.values(self._message_layout)


_EMPTY = MessageMemory(torch.empty(0, dtype=torch.uint8))
"""The memory of messages without bytes, which are not sent."""
