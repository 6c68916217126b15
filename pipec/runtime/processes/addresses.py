"""The addresses of a process, on its own machine and from others, and the secret that opens a connection."""

import asyncio
import contextlib
import json
import os
import secrets
import socket
from dataclasses import dataclass

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Address:
    """A port of ``machine``, which is reached at ``hosts``; a connection must begin with ``secret``."""

    machine: str
    hosts: tuple[str, ...]
    port: int
    secret: bytes

    def __str__(self) -> str:
        return f"port {self.port} of {self.machine} ({', '.join(self.hosts)})"

    def to_text(self) -> str:
        return json.dumps([self.machine, self.hosts, self.port, self.secret.hex()])

    @classmethod
    def parse(cls, text: str) -> "Address":
        machine, hosts, port, secret = json.loads(text)
        return cls(machine, tuple(hosts), port, bytes.fromhex(secret))

    async def connect(self, greeting: bytes, answer: bytes) -> Streams:
        """Connect to the first host that answers ``greeting`` with ``answer``. Raises OSError without one."""
        here = (_LOOPBACK,) if self.machine == socket.gethostname() else ()
        error: OSError = ConnectionRefusedError("it has no address")
        for host in (*here, *self.hosts):
            try:
                return await asyncio.wait_for(self._greet(host, greeting, answer), _CONNECT_SECONDS)
            except OSError as refused:  # TimeoutError is one
                error = refused
        raise error

    async def _greet(self, host: str, greeting: bytes, answer: bytes) -> Streams:
        reader, writer = await asyncio.open_connection(host, self.port)
        writer.write(greeting)
        try:
            if await reader.readexactly(len(answer)) == answer:
                return reader, writer
        except EOFError:
            pass
        writer.close()
        raise ConnectionRefusedError(f"another process listens at {host}:{self.port}")


def listen() -> tuple[socket.socket, Address]:
    """A socket that others can connect to, and its address."""
    if socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", 0))
    return server, Address(
        socket.gethostname(), _own_addresses(), server.getsockname()[1], secrets.token_bytes(16)
    )


def _own_addresses() -> tuple[str, ...]:
    """The addresses from which packets leave to rank 0's machine and to the default route."""
    sources = [_source_towards(os.environ.get("MASTER_ADDR", "")), _source_towards(_ANY_OTHER)]
    return tuple(dict.fromkeys(host for host in sources if host and not host.startswith("127.")))


def _source_towards(target: str) -> str | None:
    """The source address of packets to ``target``. Nothing is sent: connecting UDP only picks a route."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(target or None, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


_LOOPBACK = "127.0.0.1"
_ANY_OTHER = "192.0.2.1"
"""An address reserved for documentation (RFC 5737): packets to it take the default route."""

_CONNECT_SECONDS = 5.0
