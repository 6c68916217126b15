"""Packets of a heartbeat connection: a kind and a payload of bytes."""

import asyncio
import struct
from enum import IntEnum


class PacketKind(IntEnum):
    """``HELLO`` opens a connection; ``CLEAN_CLOSE`` ends it without a failure.

    ``FINAL_STATUS`` is a rank's final status, sent when the pipeline cannot go on; ``BACKGROUND_TEXT`` is a
    text for a background thread. ``CALL`` describes a call that all ranks make, ``ANNOUNCEMENT`` a batch of a
    stream.
    """

    HELLO = 0
    HEARTBEAT = 1
    TEXT = 2
    FAILURE = 3
    CLEAN_CLOSE = 4
    FINAL_STATUS = 5
    BACKGROUND_TEXT = 6
    CALL = 7
    ANNOUNCEMENT = 8


def encode_packet(kind: PacketKind, payload: bytes = b"") -> bytes:
    return _HEADER.pack(kind, len(payload)) + payload


async def read_packet(reader: asyncio.StreamReader, longest: int | None = None) -> tuple[PacketKind, bytes]:
    """The next packet. Raises EOFError at the end, ValueError for a malformed or too long one."""
    kind, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if longest is not None and size > longest:
        raise ValueError(f"a packet of {size} bytes, expected at most {longest}")
    return PacketKind(kind), await reader.readexactly(size)


_HEADER = struct.Struct("!BQ")
