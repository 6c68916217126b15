"""What travels on a lifeline: frames, each of one kind, with a payload of some bytes."""

import asyncio
import struct
from enum import IntEnum


class Kind(IntEnum):
    """``HELLO`` opens a connection; ``FAREWELL`` says that its end means no harm.

    ``LAST_WORDS`` are what a rank still has when the pipeline cannot go on; ``ASIDE`` is a text for a thread
    beside the one that steps.
    """

    HELLO = 0
    BEAT = 1
    TEXT = 2
    FAILURE = 3
    FAREWELL = 4
    LAST_WORDS = 5
    ASIDE = 6


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    return _HEADER.pack(kind, len(payload)) + payload


async def read_frame(reader: asyncio.StreamReader, longest: int | None = None) -> tuple[Kind, bytes]:
    """The next frame. Raises EOFError at the end, ValueError for what is none or longer than ``longest``."""
    kind, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if longest is not None and size > longest:
        raise ValueError(f"a frame of {size} bytes, where {longest} are the most")
    return Kind(kind), await reader.readexactly(size)


_HEADER = struct.Struct("!BQ")
