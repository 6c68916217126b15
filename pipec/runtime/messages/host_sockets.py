"""Sockets between processes that share a host's memory, and the handshake that proves that they do."""

import contextlib
import hmac
import json
import mmap
import os
import secrets
import socket
import struct
import sys
import weakref
from collections.abc import Callable, Collection

from pipec.runtime.messages.connections import Direction

AllGatherText = Callable[[str], list[str]]
"""The text of each rank, on every rank."""

_HELLO = struct.Struct("=q32s")


def connect(
    rank: int, directions: Collection[Direction], all_gather_text: AllGatherText
) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Sockets to the ranks that this one sends to, and from the ranks that it receives from.

    A direction has a socket if its processes have proved that they share memory: hosts, containers and
    permissions of the kernel need not be known. Every rank calls this with the same directions.
    """
    sources = {source for source, target in directions if target == rank}
    listener = _Listener(len(sources)) if sources and _is_possible() else None
    addresses = all_gather_text(listener.address if listener else "")
    tried = {
        target: _reach(addresses[target], rank)
        for source, target in sorted(directions)
        if source == rank and addresses[target]
    }
    reached = all_gather_text(json.dumps([target for target, each in tried.items() if each]))
    coming = [source for source in sources if rank in json.loads(reached[source])]
    incoming = listener.accept(coming) if listener else {}
    proved = all_gather_text(json.dumps([*incoming]))
    outgoing = {target: each for target, each in tried.items() if each and rank in json.loads(proved[target])}
    for each in (*outgoing.values(), *incoming.values()):
        each.setblocking(True)
        _OF_THIS_PROCESS.add(each)
    return outgoing, incoming


def connect_all(rank: int, num_ranks: int, all_gather_text: AllGatherText) -> dict[int, socket.socket]:
    """A socket for both directions to each rank that can share memory with this one. Every rank calls it."""
    others = [each for each in range(num_ranks) if each != rank]
    upwards = {(min(rank, each), max(rank, each)) for each in others}
    outgoing, incoming = connect(rank, upwards, all_gather_text)
    return dict(sorted((outgoing | incoming).items()))


def shared_file(num_bytes: int) -> int:
    """The descriptor of an anonymous file in memory, which is freed when the last process closes it."""
    file = os.memfd_create("pipec", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, num_bytes)  # an error now, rather than a signal at the first access
    except OSError:
        os.close(file)
        raise
    return file


def _is_possible() -> bool:
    """Whether this process can use Linux's memory files and abstract socket names."""
    if sys.platform != "linux":
        return False
    try:
        os.close(shared_file(1))
    except OSError:  # for example, forbidden by a sandbox
        return False
    return True


class _Listener:
    """The socket where sending ranks prove that they share memory with this one."""

    def __init__(self, most: int) -> None:
        self._name, self._secret = f"\0pipec-{secrets.token_hex(16)}", secrets.token_bytes(32)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(self._name)
        self._socket.listen(most + _STRANGERS)
        self._socket.settimeout(_HANDSHAKE_SECONDS)

    @property
    def address(self) -> str:
        return json.dumps([self._name, self._secret.hex()])

    def accept(self, coming: Collection[int]) -> dict[int, socket.socket]:
        """The sockets of the ranks that have connected and proved that they share memory."""
        accepted: dict[int, socket.socket] = {}
        with self._socket, contextlib.suppress(OSError):
            for _ in range(len(coming) + _STRANGERS):
                if len(accepted) == len(coming):
                    break
                connection, _ = self._socket.accept()
                source = self._proved_rank(connection)
                if source in coming:
                    accepted[source] = connection
        return accepted

    def _proved_rank(self, connection: socket.socket) -> int:
        """The rank at the other end; -1 if it has not put the secret into memory that both can read."""
        connection.settimeout(_HANDSHAKE_SECONDS)
        try:
            hello, files, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
            source, shown = _HELLO.unpack(hello)
            with contextlib.closing(mmap.mmap(files[0], len(self._secret))) as memory:
                is_shared = hmac.compare_digest(memory[:], self._secret)
            os.close(files[0])
        except (OSError, struct.error, IndexError, ValueError):
            return -1
        return source if is_shared and hmac.compare_digest(shown, self._secret) else -1


def _reach(address: str, rank: int) -> socket.socket | None:
    """A socket to the rank at ``address``, after sending it memory with its secret."""
    name, secret = json.loads(address)
    if not _is_possible():
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    try:
        connection.connect(name)
        file = shared_file(len(bytes.fromhex(secret)))
        os.pwrite(file, bytes.fromhex(secret), 0)
        socket.send_fds(connection, [_HELLO.pack(rank, bytes.fromhex(secret))], [file])
        os.close(file)
    except OSError:
        connection.close()
        return None
    return connection


_STRANGERS = 8
"""The connections of other processes of the host that are tolerated: they may connect to any name."""

_HANDSHAKE_SECONDS = 1.0
"""The timeout of the handshake. Ranks have sent their proof before the listener reads it."""

_OF_THIS_PROCESS: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close a forked process's copies, which would keep sockets open after their process has died."""
    with open(os.devnull, "rb") as nothing:
        for each in _OF_THIS_PROCESS:
            if each.fileno() >= 0:
                os.dup2(nothing.fileno(), each.fileno(), inheritable=False)
    _OF_THIS_PROCESS.clear()


os.register_at_fork(after_in_child=_close_in_child)
