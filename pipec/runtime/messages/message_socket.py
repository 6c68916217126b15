"""Whole messages over a socket between two processes of one host, waited for in the kernel."""

import contextlib
import socket
import struct
from collections.abc import Sequence

from pipec.errors import TransportError


class MessageSocket:
    """Whole messages, with errors as those of other connections. It is used by one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: bytes, file: int | None = None) -> None:
        try:
            if file is None:
                self._connection.send(message, _NO_SIGNAL)
            else:
                passed = socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(file)
                self._connection.sendmsg([message], [passed], _NO_SIGNAL)
        except BlockingIOError:
            raise TimeoutError("the other rank does not read what it was told") from None

    def receive(self, num_bytes: int) -> bytes:
        """The next message."""
        try:
            return _whole(self._connection.recv(num_bytes))
        except BlockingIOError:
            raise TimeoutError("nothing came from the other rank") from None

    def receive_nowait(self, num_bytes: int) -> bytes | None:
        """The next message, if it is there."""
        try:
            return _whole(self._connection.recv(num_bytes, _AT_ONCE))
        except BlockingIOError:
            return None

    def receive_file(self, num_bytes: int) -> tuple[bytes, int | None]:
        """The next message, and the file that came with it."""
        try:
            message, ancillary, flags, _ = self._connection.recvmsg(num_bytes, _FILE_SPACE, _CLOSED_BY_EXEC)
        except BlockingIOError:
            raise TimeoutError("nothing came from the other rank") from None
        if flags & _IS_CUT_OFF:
            raise TransportError(
                "this process cannot open another file, and needs one for memory that it shares with another "
                "rank; raise its limit of open files (ulimit -n)"
            )
        return _whole(message), _passed(ancillary) if ancillary else None

    def close(self) -> None:
        """Let nobody send or receive any more. The descriptor stays, so that it is no other file's."""
        with contextlib.suppress(OSError):  # the other end was closed before
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
_AT_ONCE = int(getattr(socket, "MSG_DONTWAIT", 0))
_CLOSED_BY_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_IS_CUT_OFF = int(socket.MSG_CTRUNC)
"""Numbers: socket's own are an enum, whose arithmetic takes as long as a system call."""
