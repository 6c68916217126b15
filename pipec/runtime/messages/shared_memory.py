"""Messages between ranks of one host, through memory that both processes have.

Each direction has a socket. The sender copies the values of a message into a *slot*, a file in memory, and
announces it there; the file itself travels with the slot's first announcement. The receiver, which blocks in
the kernel until something is announced, reads the values where they lie. When it posts the receive of a later
message, it says so on the same socket, and gives the slot of the message before back::

    sender                                   receiver
                                        <--  post
    copy into slot 0, announce it       -->  wait; reads the values in slot 0
    copy into slot 1, announce it       <--  post, slot 0 is free
    copy into slot 0, announce it       -->  wait; reads the values in slot 1

A sender waits only if the last two messages of the link have not been posted, as with gloo. So there are two
slots more than the receiver has for what it holds. Nothing here has a name that could outlive the processes.
"""

import contextlib
import itertools
import math
import mmap
import os
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipec.errors import TransportError
from pipec.ir import Instruction, Link, Sizes
from pipec.runtime.messages.buffers import Memory
from pipec.runtime.messages.connections import MOST_UNDER_WAY, Direction
from pipec.runtime.messages.host_sockets import Gather, connect, shared_file
from pipec.runtime.messages.outbox import Packing, check_values
from pipec.runtime.messages.parcels import Parcel, Parcels
from pipec.runtime.messages.sockets import Socket

_ANNOUNCEMENT = struct.Struct("=qqqq")
"""The tag, the slot, how many bytes of it are the message, and a slot that is no more; -1 for none."""

_POST = struct.Struct("=qq?")
"""The tag, the slot of an earlier message or -1, and whether that is free or belongs to the receiver now."""

_NO_SLOT = -1

Explaining = contextlib.AbstractContextManager[object]
"""What is around something that waits: it turns errors of connections into a TransportError."""


class SharedMemory:
    """One rank's messages through shared memory: where it goes is decided when ``open`` is called."""

    def __init__(self, rank: int, timeout: float) -> None:
        self._rank, self._timeout = rank, timeout
        self._asked = set[Direction]()
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        self._parcels: dict[Link, Parcels] = {}
        self._berths: dict[tuple[Link, int, int], Berth] = {}

    def open(self, directions: Collection[Direction], gather: Gather) -> None:
        """Find out which ranks share memory. Every rank calls this with the same directions."""
        if new := {*directions} - self._asked:
            self._asked |= new
            outgoing, incoming = connect(self._rank, new, self._timeout, gather)
            self._outgoing |= {peer: Outgoing(found) for peer, found in outgoing.items()}
            self._incoming |= {peer: Incoming(found) for peer, found in incoming.items()}

    def sender(self, instruction: Instruction, tag: int, explaining: Explaining) -> "SharedSender | None":
        """A send instruction, if its peer shares memory."""
        link, outgoing = instruction.link, self._outgoing.get(instruction.peer)
        if link is None or outgoing is None or not link.payload.between_computes:
            return None  # what lives longer than its microbatch would keep a slot
        return SharedSender(outgoing, link, self._parcels_of(link), tag, explaining)

    def receiver(self, instruction: Instruction, tag: int, explaining: Explaining) -> "SharedReceiver | None":
        """A receive instruction, if its peer shares memory."""
        link, incoming = instruction.link, self._incoming.get(instruction.peer)
        if link is None or incoming is None or not link.payload.between_computes:
            return None
        berth = self._berths.setdefault((link, instruction.peer, instruction.slot), Berth())
        return SharedReceiver(incoming, self._parcels_of(link), tag, berth, explaining)

    def held(self) -> list[Tensor]:
        """The memory that stays, counted by the rank that has it for now."""
        return [memory for each in self._ends() for memory in each.held()]

    def close(self) -> None:
        """End all sockets. What waits at either end of one, on any thread, gets a ConnectionError."""
        for each in self._ends():
            each.socket.close()

    def _parcels_of(self, link: Link) -> Parcels:
        """One for all instructions of a link. As values are copied anyway, all of them travel together."""
        return self._parcels.setdefault(link, Parcels(link, most_together=math.inf))

    def _ends(self) -> "list[Outgoing | Incoming]":
        return [*self._outgoing.values(), *self._incoming.values()]


@dataclass(eq=False)
class Slot:
    """Memory of a direction. It belongs to whoever was told of it last."""

    number: int
    memory: Memory


@dataclass
class Berth:
    """What has arrived in a buffer slot of the program."""

    slot: Slot | None = None


@dataclass
class _Lane:
    """The messages of one tag, as their sender sees them: its free slots, and how many are not posted yet."""

    free: list["_OwnSlot"] = field(default_factory=list)
    num_ahead: int = 0


@dataclass(eq=False)
class _OwnSlot(Slot):
    packing: Packing


class Outgoing:
    """The sender's end of a direction."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = Socket(connection)
        self._lanes: defaultdict[int, _Lane] = defaultdict(_Lane)
        self._lent: dict[int, _OwnSlot] = {}
        self._numbers = itertools.count()

    def held(self) -> Iterator[Tensor]:
        return (slot.memory.whole for lane in self._lanes.values() for slot in lane.free)

    def send(self, parcel: Parcel, tensors: Sequence[Tensor], tag: int) -> None:
        """Copy the values of a message, and announce it. Waits while two were sent that are not posted."""
        lane = self._lanes[tag]
        while lane.num_ahead == MOST_UNDER_WAY:
            self._note(self.socket.receive(_POST.size))
        while not lane.free and (post := self.socket.receive_at_once(_POST.size)):
            self._note(post)
        slot, retired, file = self._slot(lane, parcel.num_bytes)
        try:
            slot.packing.pack(parcel, tensors)
            self.socket.send(_ANNOUNCEMENT.pack(tag, slot.number, parcel.num_bytes, retired), file)
        finally:
            if file is not None:
                os.close(file)
        self._lent[slot.number] = slot
        lane.num_ahead += 1

    def _slot(self, lane: _Lane, num_bytes: int) -> tuple[_OwnSlot, int, int | None]:
        """A slot that is large enough, and if it is new, a slot that it stands in for, and its file.

        That which was freed last comes first: its memory may be in the cache.
        """
        for slot in reversed(lane.free):
            if slot.memory.num_bytes >= num_bytes:
                lane.free.remove(slot)
                return slot, _NO_SLOT, None
        retired = lane.free.pop(0).number if lane.free else _NO_SLOT
        try:
            file = shared_file(num_bytes)
        except OSError as error:
            raise TransportError(
                f"cannot get {num_bytes:,} bytes of memory to share with another rank: {error}; free memory, "
                "or raise the limits of open files and memory"
            ) from error
        memory = _mapped(file)
        return _OwnSlot(next(self._numbers), memory, Packing(memory)), retired, file

    def _note(self, post: bytes) -> None:
        """Take in what the receiver says."""
        tag, number, is_free = _POST.unpack(post)
        lane = self._lanes[tag]
        lane.num_ahead -= 1
        if number != _NO_SLOT:
            slot = self._lent.pop(number)
            if is_free:
                lane.free.append(slot)


class Incoming:
    """The receiver's end of a direction."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = Socket(connection)
        self._arrived: defaultdict[int, deque[tuple[Slot, int]]] = defaultdict(deque)
        self._given_back: defaultdict[int, dict[int, Slot]] = defaultdict(dict)
        self._holding: dict[int, Slot] = {}

    def held(self) -> Iterator[Tensor]:
        return (slot.memory.whole for slot in self._holding.values())

    def post(self, tag: int, before: Slot | None) -> None:
        """Say that one more message may come, and give back the slot of one ``before`` if it is free."""
        is_free = before is not None and before.memory.is_free
        number = _NO_SLOT
        if before is not None:
            number = before.number
            del self._holding[number]
            if is_free:
                self._given_back[tag][number] = before
        self.socket.send(_POST.pack(tag, number, is_free))

    def wait(self, tag: int, parcel: Parcel) -> Slot:
        """Wait for the next message of a tag, which is this parcel.

        What it may come in is made ready first: the rank has nothing else to do.
        """
        arrived = self._arrived[tag]
        if not arrived:
            for slot in self._given_back[tag].values():
                slot.memory.prepare(parcel)
        while not arrived:
            self._read()
        slot, num_bytes = arrived.popleft()
        if num_bytes != parcel.num_bytes:
            raise TransportError(
                f"a message of {num_bytes:,} bytes came where the plan has one of {parcel.num_bytes:,}: the "
                "ranks were given different batches; pass the same arguments on every rank"
            )
        return slot

    def _read(self) -> None:
        message, file = self.socket.receive_file(_ANNOUNCEMENT.size)
        tag, number, num_bytes, retired = _ANNOUNCEMENT.unpack(message)
        slots = self._given_back[tag]
        if retired != _NO_SLOT:
            del slots[retired]
        if file is not None:
            try:
                slots[number] = Slot(number, _mapped(file))
            finally:
                os.close(file)
        slot = self._holding[number] = slots.pop(number)
        self._arrived[tag].append((slot, num_bytes))


def _mapped(file: int) -> Memory:
    """The memory of a file, which may be closed afterwards."""
    return Memory(torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8))


class SharedSender:
    """One send instruction. What it waits for is told by ``explaining``."""

    def __init__(
        self, outgoing: Outgoing, link: Link, parcels: Parcels, tag: int, explaining: Explaining
    ) -> None:
        self._outgoing, self._link, self._parcels, self._tag = outgoing, link, parcels, tag
        self._explaining = explaining

    def __call__(self, tensors: Sequence[Tensor], sizes: Sizes) -> None:
        parcels = self._parcels.of(sizes)
        check_values(self._link, parcels, tensors)
        if parcels[0].num_bytes:
            with self._explaining:
                self._outgoing.send(parcels[0], tensors, self._tag)


class SharedReceiver:
    """One receive instruction. All receives into the same buffer slot of the program share its ``berth``."""

    def __init__(
        self, incoming: Incoming, parcels: Parcels, tag: int, berth: Berth, explaining: Explaining
    ) -> None:
        self._incoming, self._parcels, self._tag, self._berth = incoming, parcels, tag, berth
        self._explaining = explaining
        self._parcel = Parcel((), 0)

    def post(self, sizes: Sizes) -> None:
        (self._parcel,) = self._parcels.of(sizes)
        if not self._parcel.num_bytes:
            return
        before, self._berth.slot = self._berth.slot, None
        try:
            self._incoming.post(self._tag, before)
        except (TimeoutError, ConnectionError):
            with self._explaining:  # which a post that succeeds need not enter: it waits for nobody
                raise

    def wait(self) -> Sequence[Tensor]:
        if not self._parcel.num_bytes:
            return _NOTHING.values(self._parcel)
        with self._explaining:
            slot = self._berth.slot = self._incoming.wait(self._tag, self._parcel)
        return slot.memory.values(self._parcel)


_NOTHING = Memory(torch.empty(0, dtype=torch.uint8))
"""What messages without bytes are in, which are not sent."""
