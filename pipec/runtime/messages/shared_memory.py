"""Messages between CPU ranks of one host, through files in memory, without gloo's threads.

Two ranks have a Unix socket. A sender writes the values of a tensor to an unnamed file in memory, and says so
on the socket; the receiver blocks until that arrives, and reads the values. Each receive that it posts is
announced on the same socket, and returns a file that it has read::

    sender                                 receiver
                                      <--  post
    write to file 0, announce it      -->  wait; read file 0
    write to file 1, announce it      <--  post, file 0 is free
    write to file 0, announce it      -->  wait; read file 1

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
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from pipec.errors import TransportError
from pipec.runtime.messages.connections import MAX_IN_TRANSIT
from pipec.runtime.processes.star import close_in_forks

_HEADER = struct.Struct("=qqq")
"""The tag, the number of a file, and the bytes of the tensor in it, or ``_POST``."""

_POST = _NO_FILE = -1


def hosts(addresses: Sequence[str]) -> list[int]:
    """The host of each rank: the lowest rank with which it can share memory."""
    names = [json.loads(address)[0] for address in addresses]
    return [names.index(name) for name in names]


class SharedMemory:
    """One rank's messages to and from the other ranks of its host, its ``peers``.

    ``address`` says on which host this process is, and where the others connect.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._pairs = rank, dict[int, _Pair]()
        name = f"\0pipec-{secrets.token_hex(16)}"
        self._listener = _unix_socket()
        if host := _host():
            self._listener.bind(name)
            self._listener.listen(128)
        self.address = json.dumps([host or str(rank), os.getpid(), name])

    @property
    def peers(self) -> list[int]:
        return sorted(self._pairs)

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect with the ranks of this host. Every rank calls this with the addresses of all ranks."""
        found = [json.loads(address) for address in addresses]
        here = [rank for rank, (host, *_) in enumerate(found) if host == found[self._rank][0]]
        for rank in here:
            if rank < self._rank:
                connection = _unix_socket()
                connection.connect(found[rank][2])
                connection.send(struct.pack("=q", self._rank))
                self._pairs[rank] = _Pair(connection)
        while len(self._pairs) < len(here) - 1:
            connection, _ = self._listener.accept()
            process, *_ = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            )
            if process not in (found[rank][1] for rank in here):  # another process of this host
                connection.close()
                continue
            (rank,) = struct.unpack("=q", connection.recv(8))
            self._pairs[rank] = _Pair(connection)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        """Send contiguous tensors. Waits while two sent messages of the tag are not posted."""
        for tensor in tensors:
            self._pairs[peer].send(tensor, tag, MAX_IN_TRANSIT * len(tensors))

    def receive(self, tensor: Tensor, peer: int, tag: int) -> "Receive":
        """Start to receive a tensor."""
        return self._pairs[peer].post(tensor, tag)

    def close(self) -> None:
        """Shut down all sockets. Waits at either end, on any thread, raise ConnectionError."""
        self._listener.close()
        for pair in self._pairs.values():
            pair.shut_down()


def _host() -> str:
    """The kernel and the namespaces of this process, or "" if it cannot share memory, as in a sandbox."""
    try:
        os.close(os.memfd_create("pipec"))
        namespaces = (str(os.stat(f"/proc/self/ns/{name}").st_ino) for name in ("net", "pid"))
        return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *namespaces])
    except OSError:
        return ""


def _unix_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    close_in_forks(made)
    return made


class Receive:
    """A posted receive."""

    def __init__(self, pair: "_Pair", tensor: Tensor) -> None:
        self._pair, self.tensor, self._is_completed = pair, tensor, False

    def wait(self) -> None:
        while not self._is_completed:
            self._pair.take()

    def is_completed(self) -> bool:
        return self._is_completed

    def fill(self, file: int, num_bytes: int) -> None:
        """Read the values from a file."""
        if num_bytes != self.tensor.nbytes:
            raise TransportError(
                f"received {num_bytes:,} bytes, but the plan expects {self.tensor.nbytes:,}: the ranks have "
                "different batches; pass the same arguments on every rank"
            )
        _transfer(os.preadv, file, self.tensor)
        self._is_completed = True


class _Pair:
    """This rank's end of the socket to another rank.

    A file is passed with the first announcement of it, and known by its number from then on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        close_in_forks(connection)
        self._own_files, self._their_files = list[int](), list[int]()
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._num_ahead = Counter[int]()
        self._posted: defaultdict[int, deque[Receive]] = defaultdict(deque)
        self._arrived: defaultdict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._read: defaultdict[int, deque[int]] = defaultdict(deque)
        weakref.finalize(self, _close, self._own_files, self._their_files)

    def send(self, tensor: Tensor, tag: int, most_ahead: int) -> None:
        while self._num_ahead[tag] >= most_ahead:
            self.take()
        free, passed = self._free[tag], list[int]()
        try:
            if not free:
                passed.append(os.memfd_create("pipec"))
                free.append(len(self._own_files))
                self._own_files += passed
            number = free.pop()  # the file that was read last: its memory may be in the cache
            _transfer(os.pwritev, self._own_files[number], tensor)
        except OSError as error:
            raise TransportError(
                f"cannot get {tensor.nbytes:,} bytes of memory to share with another rank: {error}; free "
                "memory, or raise the limits of open files and memory"
            ) from error
        socket.send_fds(self._socket, [_HEADER.pack(tag, number, tensor.nbytes)], passed)
        self._num_ahead[tag] += 1

    def post(self, tensor: Tensor, tag: int) -> Receive:
        receive, read = Receive(self, tensor), self._read[tag]
        self._socket.send(_HEADER.pack(tag, read.popleft() if read else _NO_FILE, _POST))
        self._posted[tag].append(receive)
        self._match(tag)
        return receive

    def take(self) -> None:
        """Wait for an announcement of a value or of a post."""
        header, files, flags, _ = socket.recv_fds(self._socket, _HEADER.size, 1, _CLOSED_BY_EXEC)
        if not header:
            raise ConnectionError("the other rank has closed its end")
        if flags & socket.MSG_CTRUNC:
            raise TransportError(
                "this process cannot open another file for memory shared with another rank; raise its "
                "limit of open files (ulimit -n)"
            )
        self._their_files += files
        tag, number, num_bytes = _HEADER.unpack(header)
        if num_bytes == _POST:
            self._num_ahead[tag] -= 1
            self._free[tag] += [number] * (number != _NO_FILE)
        else:
            self._arrived[tag].append((number, num_bytes))
            self._match(tag)

    def _match(self, tag: int) -> None:
        """Fill the oldest receive of a tag with the oldest value, if there are both."""
        if (posted := self._posted[tag]) and (arrived := self._arrived[tag]):
            number, num_bytes = arrived.popleft()
            posted.popleft().fill(self._their_files[number], num_bytes)
            self._read[tag].append(number)

    def shut_down(self) -> None:
        """End all calls of the socket, which stays open, so that no file gets its number meanwhile."""
        with contextlib.suppress(OSError):  # the other end is closed already
            self._socket.shutdown(socket.SHUT_RDWR)


def _transfer(call: Callable[[int, list[memoryview], int], int], file: int, tensor: Tensor) -> None:
    """Write a contiguous tensor to a file, or read it from there, by ``os.pwritev`` or ``os.preadv``.

    Its memory is found without a view of torch, which takes as long as a message when the cache is cold.
    """
    memory = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
    position = 0
    while position < len(memory):
        position += call(file, [memory[position:]], position)


def _close(*lists: list[int]) -> None:
    for file in itertools.chain(*lists):
        os.close(file)


_CLOSED_BY_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
"""A plain integer: arithmetic with socket's own enum takes as long as a system call."""
