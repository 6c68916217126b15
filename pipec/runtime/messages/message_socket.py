"""Whole messages over a socket between two processes of one host, with blocking waits."""

import contextlib
import socket
import struct
from collections.abc import Sequence

from pipec.errors import TransportError


class MessageSocket:
    """Sends and receives whole messages; raises the errors of other connections. Not thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: bytes, file: int | None = None) -> None:
        if file is None:
            self._connection.send(message, _NO_SIGNAL)
        else:
            passed = socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(file)
            self._connection.sendmsg([message], [passed], _NO_SIGNAL)

    def receive(self, num_bytes: int) -> bytes:
        """The next message."""
        return _whole(self._connection.recv(num_bytes))

    def receive_nowait(self, num_bytes: int) -> bytes | None:
        """The next message, if it has arrived."""
        try:
            return _whole(self._connection.recv(num_bytes, _DONT_WAIT))
        except BlockingIOError:
            return None

    def receive_file(self, num_bytes: int) -> tuple[bytes, int | None]:
        """The next message, and the file that came with it."""
        message, ancillary, flags, _ = self._connection.recvmsg(num_bytes, _FILE_SPACE, _CLOSED_BY_EXEC)
        if flags & _IS_CUT_OFF:
            raise TransportError(
                "this process cannot open another file for memory shared with another rank; raise its "
                "limit of open files (ulimit -n)"
            )
        return _whole(message), _passed(ancillary) if ancillary else None

    def close(self) -> None:
        """Stop sending and receiving. The descriptor stays open, so that no other file gets its number."""
        with contextlib.suppress(OSError):  # the other end is closed already
            self._connection.shutdown(socket.SHUT_RDWR)


def _whole(message: bytes) -> bytes:
    if not message:
        raise ConnectionError("the other rank has closed its end")
    return message


def _passed(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    ((_, _, content),) = ancillary
    (file,) = _DESCRIPTOR.unpack(content)
    return int(file)


_DESCRIPTOR = struct.Struct("@i")
_FILE_SPACE = socket.CMSG_SPACE(_DESCRIPTOR.size)

_NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))
_DONT_WAIT = int(getattr(socket, "MSG_DONTWAIT", 0))
_CLOSED_BY_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_IS_CUT_OFF = int(socket.MSG_CTRUNC)
"""Plain integers: arithmetic with socket's own enum takes as long as a system call."""
