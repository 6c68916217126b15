"""Messages between CPU ranks of one host, through shared memory, without gloo's threads.

Each direction has a Unix socket. The sender copies the values of a message into a *slot*, an unnamed file in
memory, and announces it on the socket; the slot's first announcement carries the file. The receiver blocks
until an announcement arrives, and copies the values out. Each receive that it posts is announced on the same
socket, and returns a slot whose values it has copied::

    sender                                   receiver
                                        <--  post
    copy into slot 0, announce it       -->  wait; copy out of slot 0
    copy into slot 1, announce it       <--  post, slot 0 is free
    copy into slot 0, announce it       -->  wait; copy out of slot 1

As with gloo, a sender waits only if the last two messages of the link have not been posted.
"""

import contextlib
import functools
import hmac
import itertools
import json
import mmap
import os
import secrets
import socket
import struct
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pipec.errors import TransportError
from pipec.ir import Instruction, Link, Sizes
from pipec.runtime.messages.connections import MAX_IN_TRANSIT, Direction
from pipec.runtime.messages.link_values import LinkValues
from pipec.runtime.processes.star import close_in_forks

ErrorContext = contextlib.AbstractContextManager[object]
"""A context for waits, which turns errors of connections into a TransportError."""

_ANNOUNCEMENT = struct.Struct("=qqqq")
"""The tag, the slot, the message's bytes, and a slot that this one replaces, or -1."""

_POST = struct.Struct("=qq")
"""The tag, and a slot of the sender that is free, or -1."""

_NO_SLOT = -1


class SharedMemory:
    """One rank's messages through shared memory.

    ``host`` is the same text on all ranks that share memory, or "" if this process cannot. ``address`` is
    where others of the host connect.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self.host = rank, _host()
        self._name, self._secret = f"\0pipec-{secrets.token_hex(16)}", secrets.token_bytes(32)
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        close_in_forks(self._listener)
        if self.host:
            self._listener.bind(self._name)
            self._listener.listen(num_ranks)
        self.address = json.dumps([self._name, self._secret.hex()])

    def open(self, directions: Collection[Direction], addresses: dict[int, str]) -> None:
        """Connect with the ranks of this host, which have these addresses. Each calls it with the same."""
        here = {*addresses, self._rank}
        for source, target in sorted(directions):
            if source == self._rank and target in here and target not in self._outgoing:
                self._outgoing[target] = _Outgoing(self._connect(addresses[target]))
        awaited = {source for source, target in directions if target == self._rank and source in here}
        while awaited - self._incoming.keys():
            connection, _ = self._listener.accept()
            connection.settimeout(_HANDSHAKE_SECONDS)  # another process of this host may send nothing
            with contextlib.suppress(OSError, struct.error):
                source, secret = _HELLO.unpack(connection.recv(_HELLO.size))
                if hmac.compare_digest(secret, self._secret) and source in awaited - self._incoming.keys():
                    connection.settimeout(None)
                    self._incoming[source] = _Incoming(_SlotSocket(connection))
                    continue
            connection.close()

    def sender(self, instruction: Instruction, tag: int, error_context: ErrorContext) -> "_Sender | None":
        """The sender of an instruction, if its peer shares memory."""
        outgoing = self._outgoing.get(instruction.peer) if _feeds_compute(instruction) else None
        return _Sender(outgoing, instruction, tag, error_context) if outgoing is not None else None

    def receiver(self, instruction: Instruction, tag: int, error_context: ErrorContext) -> "_Receiver | None":
        """The receiver of an instruction, if its peer shares memory."""
        incoming = self._incoming.get(instruction.peer) if _feeds_compute(instruction) else None
        return _Receiver(incoming, instruction, tag, error_context) if incoming is not None else None

    def close(self) -> None:
        """Close all sockets. Waits at either end, on any thread, raise ConnectionError."""
        ends: list[_Outgoing | _Incoming] = [*self._outgoing.values(), *self._incoming.values()]
        for each in ends:
            each.socket.shut_down()

    def _connect(self, address: str) -> "_SlotSocket":
        name, secret = json.loads(address)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(name)
        connection.send(_HELLO.pack(self._rank, bytes.fromhex(secret)))
        return _SlotSocket(connection)


def _host() -> str:
    """The kernel and the network of this process, or "" if it cannot share memory, as in a sandbox."""
    try:
        os.close(_shared_file(1))
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat(_NETWORK).st_ino}"
    except OSError:
        return ""


_NETWORK = "/proc/self/ns/net"


def _feeds_compute(instruction: Instruction) -> bool:
    """Whether values are sent in every microbatch. Slots for others, such as weights, would stay for ever."""
    return instruction.link is not None and instruction.link.payload.feeds_compute


class _SlotSocket:
    """Sends and receives whole messages. It is shut down, not closed, so that no file gets its number."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        close_in_forks(connection)

    def send(self, message: bytes, file: int | None = None) -> None:
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("@i", file))] if file is not None else ()
        self._connection.sendmsg([message], passed, _NO_SIGNAL)

    def receive(self, num_bytes: int) -> bytes:
        return _whole(self._connection.recv(num_bytes))

    def receive_nowait(self, num_bytes: int) -> bytes | None:
        try:
            return _whole(self._connection.recv(num_bytes, _DONT_WAIT))
        except BlockingIOError:
            return None

    def receive_file(self, num_bytes: int) -> tuple[bytes, int | None]:
        """The next message, and the file that came with it."""
        message, passed, flags, _ = self._connection.recvmsg(num_bytes, _FILE_SPACE, _CLOSED_BY_EXEC)
        if flags & _IS_CUT_OFF:
            raise TransportError(
                "this process cannot open another file for memory shared with another rank; raise its "
                "limit of open files (ulimit -n)"
            )
        return _whole(message), struct.unpack("@i", passed[0][2])[0] if passed else None

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed already
            self._connection.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class _Slot:
    """Memory that both ends of a direction map. It belongs to the end that was notified of it last."""

    number: int
    memory: Tensor
    _shapes: object = None
    _views: list[Tensor] = field(default_factory=list)

    def views(self, tensors: Sequence[Tensor], shapes: object) -> list[Tensor]:
        """The memory, divided among tensors like these, each at a multiple of ``_ALIGNMENT`` bytes.

        Kept for the next message with the same ``shapes`` object: with a cold cache, making a view takes as
        long as a message.
        """
        if shapes is not self._shapes:
            ends = [*itertools.accumulate(_aligned(tensor.nbytes) for tensor in tensors)]
            self._shapes, self._views = (
                shapes,
                [
                    self.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                    for start, tensor in zip([0, *ends], tensors, strict=False)
                ],
            )
        return self._views


@dataclass
class _TagQueue:
    """The sender's state of one tag: free slots, and the number of messages not posted yet."""

    free: list[_Slot] = field(default_factory=list)
    num_ahead: int = 0


class _Outgoing:
    """The sender's end of a direction."""

    def __init__(self, connection: _SlotSocket) -> None:
        self.socket = connection
        self._tag_queues: defaultdict[int, _TagQueue] = defaultdict(_TagQueue)
        self._in_use: dict[int, _Slot] = {}
        self._numbers = itertools.count()

    def send(self, tensors: Sequence[Tensor], shapes: object, tag: int) -> None:
        """Copy the values of a message, and announce it. Waits while two sent messages are not posted."""
        queue = self._tag_queues[tag]
        while queue.num_ahead == MAX_IN_TRANSIT:
            self._note(self.socket.receive(_POST.size))
        while not queue.free and (post := self.socket.receive_nowait(_POST.size)):
            self._note(post)
        num_bytes = _num_bytes(tensors)
        slot, retired, file = self._slot(queue, num_bytes)
        try:
            for view, tensor in zip(slot.views(tensors, shapes), tensors, strict=True):
                view.copy_(tensor)
            self.socket.send(_ANNOUNCEMENT.pack(tag, slot.number, num_bytes, retired), file)
        finally:
            if file is not None:
                os.close(file)
        self._in_use[slot.number] = slot
        queue.num_ahead += 1

    def _slot(self, queue: _TagQueue, num_bytes: int) -> tuple[_Slot, int, int | None]:
        """A large enough slot; if it is new, also the number of the slot it replaces, and its file.

        Prefers the slot that was freed last: its memory may be in the cache.
        """
        for slot in reversed(queue.free):
            if len(slot.memory) >= num_bytes:
                queue.free.remove(slot)
                return slot, _NO_SLOT, None
        retired = queue.free.pop(0).number if queue.free else _NO_SLOT
        try:
            file = _shared_file(num_bytes)
        except OSError as error:
            raise TransportError(
                f"cannot get {num_bytes:,} bytes of memory to share with another rank: {error}; free memory, "
                "or raise the limits of open files and memory"
            ) from error
        return _Slot(next(self._numbers), _mapped(file)), retired, file

    def _note(self, post: bytes) -> None:
        """Process a post of the receiver."""
        tag, number = _POST.unpack(post)
        self._tag_queues[tag].num_ahead -= 1
        if number != _NO_SLOT:
            self._tag_queues[tag].free.append(self._in_use.pop(number))


class _Incoming:
    """The receiver's end of a direction."""

    def __init__(self, connection: _SlotSocket) -> None:
        self.socket = connection
        self._slots: dict[int, _Slot] = {}
        self._copied: defaultdict[int, deque[int]] = defaultdict(deque)
        self._arrived: dict[tuple[int, int], tuple[_Slot, int]] = {}
        self._num_posted, self._num_arrived = Counter[int](), Counter[int]()

    def post(self, tag: int) -> int:
        """Allow one more message, and give back a slot; returns the message's number in its tag."""
        copied = self._copied[tag]
        self.socket.send(_POST.pack(tag, copied.popleft() if copied else _NO_SLOT))
        self._num_posted[tag] += 1
        return self._num_posted[tag] - 1

    def wait(self, tag: int, number: int, into: Sequence[Tensor], shapes: object) -> None:
        """Wait for a message of a tag by its number, and copy its values."""
        while (tag, number) not in self._arrived:
            self._read()
        slot, num_bytes = self._arrived.pop((tag, number))
        if num_bytes != _num_bytes(into):
            raise TransportError(
                f"received a message of {num_bytes:,} bytes, but the plan expects {_num_bytes(into):,}: the "
                "ranks have different batches; pass the same arguments on every rank"
            )
        for tensor, view in zip(into, slot.views(into, shapes), strict=True):
            tensor.copy_(view)
        self._copied[tag].append(slot.number)

    def _read(self) -> None:
        message, file = self.socket.receive_file(_ANNOUNCEMENT.size)
        tag, number, num_bytes, retired = _ANNOUNCEMENT.unpack(message)
        self._slots.pop(retired, None)
        if file is not None:
            try:
                self._slots[number] = _Slot(number, _mapped(file))
            finally:
                os.close(file)
        self._arrived[tag, self._num_arrived[tag]] = self._slots[number], num_bytes
        self._num_arrived[tag] += 1


class _Sender:
    """One send instruction. ``error_context`` describes its waits."""

    def __init__(
        self, outgoing: _Outgoing, instruction: Instruction, tag: int, error_context: ErrorContext
    ) -> None:
        assert instruction.link is not None
        self._outgoing, self._tag, self._error_context = outgoing, tag, error_context
        self._values = _values_of(instruction.link)

    def __call__(self, tensors: Sequence[Tensor], sizes: Sizes) -> None:
        self._values.check(tensors, sizes)
        if _num_bytes(tensors):
            with self._error_context:
                self._outgoing.send(tensors, self._values.shapes(sizes), self._tag)


class _Receiver:
    """One receive instruction."""

    def __init__(
        self, incoming: _Incoming, instruction: Instruction, tag: int, error_context: ErrorContext
    ) -> None:
        assert instruction.link is not None
        self._incoming, self._tag, self._error_context = incoming, tag, error_context
        self._link_values, self._number = _values_of(instruction.link), 0
        self._values: list[Tensor] = []
        self._shapes: object = None

    def post(self, sizes: Sizes) -> None:
        self._values, self._shapes = self._link_values.empty(sizes, _CPU), self._link_values.shapes(sizes)
        if _num_bytes(self._values):
            try:
                self._number = self._incoming.post(self._tag)
            except ConnectionError:
                with self._error_context:  # entered only on failure, because a post does not wait
                    raise

    def wait(self) -> Sequence[Tensor]:
        values, self._values = self._values, []
        if _num_bytes(values):
            with self._error_context:
                self._incoming.wait(self._tag, self._number, values, self._shapes)
        return values


@functools.lru_cache(maxsize=256)
def _values_of(link: Link) -> LinkValues:
    """The values of a link, the same object for all its instructions."""
    return LinkValues(link)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


_CPU = torch.device("cpu")
_ALIGNMENT = 64
"""Values begin at multiples of a cache line."""


def _shared_file(num_bytes: int) -> int:
    """The descriptor of an anonymous file in memory, which is freed when the last process closes it."""
    file = os.memfd_create("pipec", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, num_bytes)  # an error now, rather than a signal at the first access
    except OSError:
        os.close(file)
        raise
    return file


def _mapped(file: int) -> Tensor:
    """The memory of a file, which may be closed afterwards."""
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)


def _whole(message: bytes) -> bytes:
    if not message:
        raise ConnectionError("the other rank has closed its end")
    return message


_HELLO = struct.Struct("=q32s")
_HANDSHAKE_SECONDS = 1.0
_FILE_SPACE = socket.CMSG_SPACE(struct.calcsize("@i"))

_NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))
_DONT_WAIT = int(getattr(socket, "MSG_DONTWAIT", 0))
_CLOSED_BY_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_IS_CUT_OFF = int(socket.MSG_CTRUNC)
"""Plain integers: arithmetic with socket's own enum takes as long as a system call."""
