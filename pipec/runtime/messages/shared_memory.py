"""Messages between CPU ranks of one host, through files in memory, without gloo's threads.

Each direction has a Unix socket, and an unnamed file in memory that is divided into *places*. A sender
writes the values of a message to a free place and says so on the socket; the receiver blocks until that
arrives, and reads the values. Each receive that it posts is announced on the same socket, and frees a place
that it has read::

    sender                                  receiver
                                       <--  post
    write to place 0, announce it      -->  wait; read place 0
    write to place 1, announce it      <--  post, place 0 is free
    write to place 0, announce it      -->  wait; read place 1

As with gloo, a sender waits only if the last two messages of a tag have not been posted.
"""

import contextlib
import ctypes
import itertools
import json
import os
import secrets
import socket
import struct
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, KeysView, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pipec.errors import TransportError
from pipec.runtime.messages.connections import MAX_IN_TRANSIT
from pipec.runtime.processes.star import close_in_forks

_MESSAGE = struct.Struct("=qqq")
"""The tag, the place, and the bytes of all values."""

_POST = struct.Struct("=qq")
"""The tag, and a place that is free, or ``_NO_PLACE``."""

_NO_PLACE = -1

_PLACE_BYTES = 1 << 40
"""From one place to the next. A file takes memory only where something was written."""


def hosts(addresses: Sequence[str]) -> list[int]:
    """The host of each rank: the lowest rank with which it can share memory."""
    names = [json.loads(address)[0] for address in addresses]
    return [names.index(name) for name in names]


class SharedMemory:
    """One rank's messages to and from the other ranks of its host, its ``peers``.

    ``address`` says on which host this process is, and where the others connect.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outgoing, self._incoming = dict[int, _Outgoing](), dict[int, _Incoming]()
        name = f"\0pipec-{secrets.token_hex(16)}"
        self._listener = _unix_socket()
        if host := _host():
            self._listener.bind(name)
            self._listener.listen(_MOST_WAITING)
        self.address = json.dumps([host or str(rank), os.getpid(), name])

    @property
    def peers(self) -> KeysView[int]:
        return self._outgoing.keys()

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect with the ranks of this host. Every rank calls this with the addresses of all ranks."""
        host, *_ = json.loads(addresses[self._rank])
        found = {rank: json.loads(address) for rank, address in enumerate(addresses) if rank != self._rank}
        here = {
            rank: (process, name) for rank, (its_host, process, name) in found.items() if its_host == host
        }
        for rank, (_, name) in here.items():
            self._outgoing[rank] = _Outgoing(name, self._rank)
        while len(self._incoming) < len(here):
            connection, _ = self._listener.accept()
            process, *_ = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            if process not in (its_process for its_process, _ in here.values()):  # a stranger of this host
                connection.close()
                continue
            hello, files, *_ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
            (rank,) = _HELLO.unpack(_whole(hello))
            if not files:
                raise TransportError(
                    f"this process cannot open another file, for memory that it shares with rank {rank}; "
                    "raise its limit of open files (ulimit -n)"
                )
            self._incoming[rank] = _Incoming(connection, files[0])

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        """Send contiguous tensors. Waits while two sent messages of the tag are not posted."""
        self._outgoing[peer].send(tensors, tag)

    def receive(self, tensors: Sequence[Tensor], peer: int, tag: int) -> "Receive":
        """Start to receive contiguous tensors."""
        return self._incoming[peer].post(tensors, tag)

    def close(self) -> None:
        """Shut down all sockets. Waits at either end, on any thread, raise ConnectionError.

        They stay open, so that no file gets the number of one meanwhile.
        """
        self._listener.close()
        ends: list[_Outgoing | _Incoming] = [*self._outgoing.values(), *self._incoming.values()]
        for end in ends:
            with contextlib.suppress(OSError):  # the other end is closed already
                end.socket.shutdown(socket.SHUT_RDWR)


def _host() -> str:
    """The kernel and the namespaces of this process, or "" if it cannot share memory, as in a sandbox."""
    try:
        file = os.memfd_create("pipec")
        try:
            os.pwrite(file, b"x", _PLACE_BYTES)  # the size of files may be limited
        finally:
            os.close(file)
        namespaces = (str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("net", "pid"))
        return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *namespaces])
    except OSError:
        return ""


def _unix_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    close_in_forks(made)
    return made


_MOST_WAITING = 4096
"""Ranks of a host that may wait to be let in, while this one still connects with others."""

_HELLO = struct.Struct("=q")
"""The rank that sends; its file comes with it."""


class _Outgoing:
    """The sender's end of a direction."""

    def __init__(self, name: str, rank: int) -> None:
        self.socket, self._file = _unix_socket(), os.memfd_create("pipec")
        weakref.finalize(self, os.close, self._file)
        self.socket.connect(name)
        socket.send_fds(self.socket, [_HELLO.pack(rank)], [self._file])
        self._places = itertools.count(0, _PLACE_BYTES)
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._num_ahead = Counter[int]()

    def send(self, tensors: Sequence[Tensor], tag: int) -> None:
        free, num_bytes = self._free[tag], sum(tensor.nbytes for tensor in tensors)
        while self._num_ahead[tag] >= MAX_IN_TRANSIT:
            self._take_post()
        with contextlib.suppress(BlockingIOError):
            while not free:
                self._take_post(_DONT_WAIT)
        place = free.pop() if free else next(self._places)  # one read last may be in the cache
        try:
            _transfer(os.pwritev, self._file, place, tensors)
        except OSError as error:
            raise TransportError(
                f"cannot get {num_bytes:,} bytes of memory to share with another rank: {error}; free memory, "
                "or raise its limit"
            ) from error
        self.socket.send(_MESSAGE.pack(tag, place, num_bytes))
        self._num_ahead[tag] += 1

    def _take_post(self, flags: int = 0) -> None:
        tag, place = _POST.unpack(_whole(self.socket.recv(_POST.size, flags)))
        self._num_ahead[tag] -= 1
        self._free[tag] += [place] * (place != _NO_PLACE)


class _Incoming:
    """The receiver's end of a direction."""

    def __init__(self, connection: socket.socket, file: int) -> None:
        self.socket, self._file = connection, file
        weakref.finalize(self, os.close, file)
        close_in_forks(connection)
        self._posted: defaultdict[int, deque[Receive]] = defaultdict(deque)
        self._arrived: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._read: defaultdict[int, deque[int]] = defaultdict(deque)

    def post(self, tensors: Sequence[Tensor], tag: int) -> "Receive":
        receive, read = Receive(self, tensors), self._read[tag]
        self.socket.send(_POST.pack(tag, read.popleft() if read else _NO_PLACE))
        self._posted[tag].append(receive)
        self._match(tag)
        return receive

    def take(self) -> None:
        """Wait for a message of any tag."""
        tag, place, num_bytes = _MESSAGE.unpack(_whole(self.socket.recv(_MESSAGE.size)))
        self._arrived[tag].append((place, num_bytes))
        self._match(tag)

    def _match(self, tag: int) -> None:
        """Fill the oldest receive of a tag with the oldest message, if there are both."""
        if (posted := self._posted[tag]) and (arrived := self._arrived[tag]):
            place, num_bytes = arrived.popleft()
            posted.popleft().fill(self._file, place, num_bytes)
            self._read[tag].append(place)


class Receive:
    """A posted receive."""

    def __init__(self, incoming: _Incoming, tensors: Sequence[Tensor]) -> None:
        self._incoming, self._tensors, self._is_completed = incoming, tensors, False

    def wait(self) -> None:
        while not self._is_completed:
            self._incoming.take()

    def fill(self, file: int, place: int, num_bytes: int) -> None:
        """Read the values from a place of a file."""
        expected = sum(tensor.nbytes for tensor in self._tensors)
        if num_bytes != expected:
            raise TransportError(
                f"received {num_bytes:,} bytes, but the plan expects {expected:,}: the ranks have different "
                "batches; pass the same arguments on every rank"
            )
        _transfer(os.preadv, file, place, self._tensors)
        self._is_completed = True


def _transfer(
    call: Callable[[int, list[Any], int], int], file: int, place: int, tensors: Sequence[Tensor]
) -> None:
    """Write contiguous tensors to a file one after the other, or read them, by ``os.pwritev``/``os.preadv``.

    Their memory is found without a view of torch, which takes as long as a message when the cache is cold.
    """
    left: list[Any] = [(ctypes.c_char * x.nbytes).from_address(x.data_ptr()) for x in tensors]
    while left:
        count = call(file, left[:_MOST_BUFFERS], place)
        place += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = memoryview(left[0]).cast("B")[count:]


def _whole(message: bytes) -> bytes:
    if not message:
        raise ConnectionError("the other rank has closed its end")
    return message


_MOST_BUFFERS = 1024
"""Linux transfers so many at once."""

_DONT_WAIT = int(getattr(socket, "MSG_DONTWAIT", 0))
"""A plain integer: arithmetic with socket's own enum takes as long as a system call."""
