"""A star: each rank has one connection, to rank 0, for life signs, failures and texts.

It carries no tensors. A thread in each process sends heartbeats, and reads the packets that arrive:

* If a process dies, its connection closes. Rank 0 knows at once, and tells all ranks which one died. If rank
  0 itself dies, all others see their own connection close.
* If a process is stopped, or its machine is lost, its heartbeats stop. It is named after the timeout.
* A rank that fails sends the reason; rank 0 hands the first one to all. A rank whose script ends, or that
  frees its pipeline, sends CLEAN_CLOSE, which is a failure only for ranks that still need it.
* A heartbeat says what its rank waits for. So rank 0 can name the rank at the end of a chain of waits once a
  wait has taken the timeout. While that rank is between two calls, for example to save, no time counts.

Ranks exchange texts by way of rank 0, which sends all of them what it has collected. Packets of one kind
between two ranks arrive in order.
Torch's store, which is in the process of rank 0, is used for rank 0's address alone.
"""

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
import struct
import sys
import sysconfig
import textwrap
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import FrameType

from pipec.console import logger
from pipec.errors import TransportError
from pipec.runtime.processes.judge import NOT_WAITING, Judge, WaitStatus, format_ranks


class PacketKind(IntEnum):
    """What a packet is.

    ``ENDED`` says that a rank ended without a failure. ``FINAL_STATUS`` is a rank's status when the pipeline
    cannot go on, and rank 0's reply with those of all. ``CALL`` describes a call that all ranks make,
    ``ANNOUNCEMENT`` a batch of a stream; ``BACKGROUND_TEXT`` is a text for a background thread.
    """

    HEARTBEAT = 1
    TEXT = 2
    FAILURE = 3
    CLEAN_CLOSE = 4
    FINAL_STATUS = 5
    BACKGROUND_TEXT = 6
    CALL = 7
    ANNOUNCEMENT = 8
    ENDED = 9


class WaitScope:
    """A reusable context manager in which a rank waits. Each entry is a new wait."""

    __slots__ = ("_before", "_star", "_wait")

    def __init__(self, star: "Star", *wait: object) -> None:
        self._star, self._wait, self._before = star, wait, NOT_WAITING

    def __enter__(self) -> None:
        self._before, self._star.wait_status = self._star.wait_status, WaitStatus(*self._wait)  # type: ignore[arg-type]

    def __exit__(self, *raised: object) -> None:
        self._star.last_activity, self._star.wait_status = self._star.wait_status.activity, self._before


class Star:
    """The connection of one rank. The thread calls ``on_failure`` once the pipeline cannot go on.

    Rank 0 calls ``accept`` and then ``wait_for_all``; the others greet it and ``follow`` rank 0.
    """

    def __init__(self, rank: int, num_ranks: int, timeout: float) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.on_failure: Callable[[], None] = lambda: None
        self.wait_status, self.last_activity = NOT_WAITING, ""
        self._timeout, self._interval = timeout, min(_LONGEST_INTERVAL, timeout / 5)
        self._judge = Judge(rank, num_ranks, timeout, self._interval)
        self._connections: dict[int, _Connection] = {}
        self._arrived: defaultdict[tuple[int, PacketKind], deque[bytes]] = defaultdict(deque)
        self._failure: str | None = None
        self._ended, self._ended_at = "", 0.0
        self._wait_number, self._last_wait = 0, NOT_WAITING
        self._interrupting = False
        self._changed = threading.Condition(threading.RLock())
        self._server: socket.socket | None = None
        self._secret = b""
        self._tasks = set[asyncio.Task[None]]()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="pipec star", daemon=True)
        self._thread.start()

    # How ranks find each other.

    def accept(self, server: socket.socket, secret: bytes) -> None:
        """Let the other ranks, which know the secret, connect from now on."""
        self._server, self._secret = server, secret
        self._loop.call_soon_threadsafe(lambda: self._start(self._accept()))

    def wait_for_all(self) -> None:
        """Wait on rank 0 until every rank is connected. Raises TransportError, which names missing ranks."""
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while missing := [rank for rank in range(1, self.num_ranks) if rank not in self._connections]:
                self.check()
                if time.monotonic() > deadline:
                    reason = (
                        f"rank 0 waited {self._timeout:g} s for {format_ranks(missing)}, which did not "
                        "connect: that process was not started, died or hangs before it makes its pipeline"
                    )
                    self.fail(reason)
                    raise TransportError(reason)
                self._changed.wait(_POLL_SECONDS)

    def follow(self, rank: int, connection: socket.socket, answer: bytes = b"") -> None:
        """Read a rank's packets from now on. On rank 0, it first gets the ``answer`` to its greeting."""
        followed = _Connection(
            self._loop, connection, lambda *x: self._take(rank, *x), lambda: self._end(rank)
        )
        with self._changed:
            if answer:
                followed.send(answer)
                if self._failure is not None:
                    followed.send(encode_packet(PacketKind.FAILURE, self._failure.encode()))
            self._connections[rank] = followed
            self._judge.join(rank)
            self._changed.notify_all()
        self._loop.call_soon_threadsafe(followed.start)

    # Texts.

    def send(self, peer: int, kind: PacketKind, payload: bytes) -> None:
        """Send a packet to rank 0, or from it, for ``receive``. It is dropped once a rank has ended."""
        assert 0 in (self.rank, peer), "ranks have connections to rank 0 alone"
        if peer in self._connections:
            self._connections[peer].send(encode_packet(kind, payload))

    def receive(self, peer: int, kind: PacketKind, of_processes: bool = False) -> bytes:
        """The next packet of a kind from a rank; waits while the ranks can go on.

        ``of_processes`` waits while the processes live, even if a step has failed.

        Raises:
            TransportError: a rank failed or ended.
        """
        arrived, reason = self._arrived[peer, kind], None
        with self._changed:
            while not arrived and reason is None:
                reason = self._process_end() if of_processes else self._reason_to_stop()
                if reason is None:
                    self._changed.wait(_POLL_SECONDS if self._ended else None)
            if arrived:
                return arrived.popleft()
        raise self._error(reason or "")

    def all_gather(
        self, own: bytes, kind: PacketKind, activity: str, limited: bool = True, of_processes: bool = False
    ) -> list[bytes]:
        """The bytes of all ranks, by rank; for a background thread without an ``activity``.

        Raises:
            TransportError: a rank failed or ended or, if the wait is ``limited``, did not answer.
        """

        def receive(peer: int) -> bytes:
            waiting = self.waiting(activity, peer, limited=limited) if activity else contextlib.nullcontext()
            with waiting:
                return self.receive(peer, kind, of_processes)

        if self.rank != 0:
            self.send(0, kind, own)
            return _unpacked(receive(0))
        parts = [own, *map(receive, range(1, self.num_ranks))]
        self.send_to_all(kind, _packed(parts))
        return parts

    def send_to_all(self, kind: PacketKind, payload: bytes) -> None:
        """Send a packet from rank 0 to every other rank."""
        packet = encode_packet(kind, payload)
        for connection in list(self._connections.values()):
            connection.send(packet)

    def channel(self, peer: int, kind: PacketKind) -> "Channel":
        """Messages of a kind between rank 0 and another rank."""
        return Channel(self, peer, kind)

    def exchange_final_status(self, text: str) -> dict[int, str | None]:
        """The final statuses of other ranks, exchanged when the pipeline cannot go on.

        None for a rank that may live, and whose status rank 0 does not get within a second.
        """
        kind, unknown = PacketKind.FINAL_STATUS, dict.fromkeys(range(self.num_ranks))
        if self.rank != 0:
            self.send(0, kind, text.encode())
            arrived = self._arrived[0, kind]
            with self._changed:
                self._changed.wait_for(
                    lambda: arrived or 0 not in self._judge.answering(), 2 * _STATUS_SECONDS
                )
                statuses = json.loads(arrived.popleft()) if arrived else unknown
        else:
            with self._changed:
                self._changed.wait_for(
                    lambda: all(map(self._has_status, self._judge.answering())), _STATUS_SECONDS
                )
                found = {rank: self._arrived[rank, kind] for rank in self._judge.answering()}
                statuses = {rank: each.popleft().decode() if each else None for rank, each in found.items()}
            self.send_to_all(kind, json.dumps(statuses | {0: text}).encode())
        return {int(rank): status for rank, status in statuses.items() if int(rank) != self.rank}

    def _has_status(self, rank: int) -> bool:
        return bool(self._arrived[rank, PacketKind.FINAL_STATUS])

    # Failures.

    def fail(self, reason: str) -> None:
        """Send every rank the reason why this one cannot go on, unless a failure is known already."""
        self._set_failure(reason if reason.startswith("rank ") else f"rank {self.rank}: {reason}")

    def check(self) -> None:
        """Raise TransportError if the ranks cannot all go on."""
        if reason := self.reason():
            raise self._error(reason)

    def check_processes(self) -> None:
        """Raise TransportError if the process of a rank ended or is stopped, even if a step has failed."""
        if reason := self._process_end():
            raise self._error(reason)

    def reason(self, within: float = 0.0) -> str | None:
        """The reason why the ranks cannot go on; None if it is not known ``within`` so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._ended, within)
            return self._failure or self._ended or None

    def waits_for(self, peer: int | None) -> str:
        """A description of the chain of waits that begins at ``peer``, on rank 0; see ``Judge.chain``."""
        return self._judge.chain(self.rank, peer, self.wait_status.activity)

    def waiting(
        self, activity: str, peer: int | None = None, expected: bool = False, limited: bool = False
    ) -> WaitScope:
        """Inside a ``with``, heartbeats carry this rank's activity and the rank that it waits for."""
        return WaitScope(self, activity, peer, expected, limited)

    def note_progress(self) -> None:
        """Count a limited wait from now: something that it waits for has arrived."""
        self._wait_number += 1

    @contextlib.contextmanager
    def interrupted_by_failures(self) -> Iterator[None]:
        """Inside a ``with``, the failure of another rank interrupts the main thread as Ctrl-C would.

        Raises TransportError then. On another thread, or if the program handles Ctrl-C itself, the next wait
        finds the failure instead. Where Ctrl-C is ignored, as in a shell's background jobs, it stays ignored.
        """
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT)
        is_ignored = is_main and handler is signal.SIG_IGN
        self._interrupting = is_ignored or (is_main and handler is signal.default_int_handler)
        try:
            try:
                if is_ignored:
                    signal.signal(signal.SIGINT, self._on_interrupt)
                self.check()  # an earlier failure interrupts nothing
                yield
            finally:
                if is_ignored:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                with self._changed:
                    self._interrupting = False
        except KeyboardInterrupt:
            self.check()
            raise

    def close(self) -> None:
        """Send CLEAN_CLOSE, and end the thread."""
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    # Run on the calling thread.

    def _reason_to_stop(self) -> str | None:
        """The failure of a rank; or the end of one, once what other ranks sent before has arrived."""
        return self._failure or self._process_end()

    def _process_end(self) -> str | None:
        has_arrived = self._ended and time.monotonic() - self._ended_at > _ARRIVAL_SECONDS
        return self._ended if has_arrived else None

    def _error(self, reason: str) -> TransportError:
        own = f"rank {self.rank}: "
        if reason.startswith(own):
            return TransportError(reason.removeprefix(own))
        self.fail(reason)
        return TransportError(f"another rank failed:\n{textwrap.indent(reason, '  ')}")

    # Run on the thread of the star.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    async def _live(self) -> None:
        self._start(self._beat())
        await self._closing.wait()
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        for connection in self._connections.values():
            connection.send(encode_packet(PacketKind.CLEAN_CLOSE))
            connection.end_sending()
        deadline = self._loop.time() + _JOIN_SECONDS / 4  # a peer that closes too has read everything
        while self._loop.time() < deadline and not all(x.is_over for x in self._connections.values()):
            await asyncio.sleep(_FLUSH_SECONDS)
        for connection in self._connections.values():
            connection.close()

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        assert self._server is not None
        while True:
            with contextlib.suppress(OSError):  # such as no free file descriptor: the rank tries again
                connection, _ = await self._loop.sock_accept(self._server)
                self._start(self._greet(connection))
                continue
            await asyncio.sleep(_POLL_SECONDS)

    async def _greet(self, connection: socket.socket) -> None:
        """Follow a connection whose greeting has the secret; close that of a stranger."""
        try:
            greeting = b""
            async with asyncio.timeout(_GREETING_SECONDS):
                while len(greeting) < _GREETING.size:
                    part = await self._loop.sock_recv(connection, _GREETING.size - len(greeting))
                    if not part:
                        raise EOFError
                    greeting += part
            rank, nonce, proof = _GREETING.unpack(greeting)
            is_expected = 0 < rank < self.num_ranks and rank not in self._connections
            if not is_expected or not hmac.compare_digest(proof, _proof(self._secret, b"rank", rank, nonce)):
                raise ConnectionError("not a rank of this pipeline")
        except (OSError, EOFError):  # TimeoutError is an OSError
            connection.close()
            return
        self.follow(rank, connection, _proof(self._secret, b"rank 0", rank, nonce))

    def _take(self, rank: int, kind: PacketKind, payload: bytes) -> None:
        """Take a packet that arrived from ``rank``."""
        self._judge.heard(rank)
        match kind:
            case PacketKind.HEARTBEAT:
                self._judge.note(rank, *_decoded(payload))
            case PacketKind.FAILURE:
                self._set_failure(payload.decode(), spread=self.rank == 0)
            case PacketKind.CLEAN_CLOSE:
                self._judge.close(rank)
            case PacketKind.ENDED:
                self._set_ended(payload.decode())
            case _:
                with self._changed:
                    self._arrived[rank, kind].append(payload)
                    self._changed.notify_all()

    def _end(self, rank: int) -> None:
        """Note that a rank's connection has ended, and tell the others, unless this one closes too."""
        if self._closing.is_set():
            return
        if self._judge.end(rank):
            self._set_ended(f"rank {rank}: its script ended, or freed its pipeline, before this call")
        else:
            reason = f"rank {rank}: its process died; its own output may say why"
            self._set_failure(reason)
            self._set_ended(reason)

    def _set_ended(self, reason: str) -> None:
        with self._changed:
            first = not self._ended
            if first:
                self._ended, self._ended_at = reason, time.monotonic()
            self._changed.notify_all()
        if first and self.rank == 0:
            self._spread(PacketKind.ENDED, reason)

    def _set_failure(self, reason: str, spread: bool = True) -> None:
        """Note a failure, and hand it on before anything is closed. The first one counts."""
        with self._changed:
            first, self._failure = self._failure is None, self._failure or reason
            self._changed.notify_all()
        if first:
            if spread:
                self._spread(PacketKind.FAILURE, reason)
            self._interrupt_if_stopped()
            try:
                self.on_failure()
            except Exception:
                logger.exception("closing the connections failed")

    def _spread(self, kind: PacketKind, text: str) -> None:
        if self.rank == 0:
            self.send_to_all(kind, text.encode())
        else:
            self.send(0, kind, text.encode())

    async def _beat(self) -> None:
        """Send heartbeats, and judge the other ranks, except while this process is suspended."""
        while True:
            await asyncio.sleep(self._interval)
            wait = self.wait_status
            if wait is not self._last_wait:
                self._last_wait, self._wait_number = wait, self._wait_number + 1
            state = self._wait_number, wait, self.last_activity, "" if wait.activity else _line_of_script()
            self._spread(PacketKind.HEARTBEAT, json.dumps(state))
            try:
                self._judge.note(self.rank, *state)
                self._judge_ranks()
            except Exception:  # life signs go on whatever happens here
                logger.exception("judging what the ranks do failed")

    def _judge_ranks(self) -> None:
        self._judge.beat()
        if lost := self._judge.lost():
            self._set_failure(lost)
            self._set_ended(lost)
        elif self._failure is None and (overdue := self._judge.overdue()):
            self._set_failure(overdue)
        elif self._failure is None and (report := self._judge.report()):
            logger.warning("%s", report)
        self._interrupt_if_stopped()

    def _interrupt_if_stopped(self) -> None:
        with self._changed:
            if self._interrupting and self._reason_to_stop():
                self._interrupting = False
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _on_interrupt(self, number: int, frame: object) -> None:
        """Handle SIGINT where Ctrl-C is ignored: only ``_interrupt_if_stopped`` interrupts."""
        if not self._interrupting:
            raise KeyboardInterrupt


@dataclass(frozen=True)
class Channel:
    """Messages of one kind between rank 0 and another rank, in the order in which they are sent."""

    _star: Star
    _peer: int
    _kind: PacketKind

    def send(self, message: bytes) -> None:
        self._star.send(self._peer, self._kind, message)

    def receive(self, num_bytes: int) -> bytes:
        """The next message. Raises ConnectionError if a rank failed."""
        try:
            return self._star.receive(self._peer, self._kind)
        except TransportError as error:
            raise ConnectionError(str(error)) from None


def _line_of_script() -> str:
    """The line of the script that the main thread runs, or "" while it is in a call of pipec."""
    innermost = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    script: FrameType | None = None
    while frame is not None:
        if _package(frame) == "pipec":
            return ""
        is_installed = _package(frame) == "torch" or frame.f_code.co_filename.startswith(_INSTALLED)
        script = script or (None if is_installed else frame)
        frame = frame.f_back
    frame = script or innermost
    return (
        f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""
    )


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


_INSTALLED = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    "<frozen",
)


# Sockets and packets.


class _Connection:
    """A socket to another rank. Any thread sends; the loop's thread reads, and calls ``take`` and ``end``."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        take: Callable[[PacketKind, bytes], None],
        end: Callable[[], None],
    ) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        close_in_forks(connection)
        self._loop, self._socket, self._take, self._end = loop, connection, take, end
        self._lock = threading.Lock()
        self._unsent, self._received = bytearray(), bytearray()
        self._is_ending = self.is_over = False

    def start(self) -> None:
        self._loop.add_reader(self._socket, self._read)

    def send(self, packet: bytes) -> None:
        """Send at once what the socket takes, the rest when it takes more. An error is left to the reader."""
        with self._lock:
            if self.is_over or self._is_ending:
                return
            was_idle = not self._unsent
            self._unsent += packet
            if was_idle:
                self._send_unsent()
                if self._unsent:
                    with contextlib.suppress(RuntimeError):  # the thread has ended
                        self._loop.call_soon_threadsafe(self._flush_later)

    def end_sending(self) -> None:
        """Send nothing more, so that the other end reads the end once it has read everything."""
        with self._lock:
            self._is_ending = True
            if not self._unsent:
                self._shut_down()

    def close(self) -> None:
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()

    def _flush_later(self) -> None:
        if not self.is_over:
            self._loop.add_writer(self._socket, self._flush)

    def _flush(self) -> None:
        with self._lock:
            self._send_unsent()
            if not self._unsent:
                self._loop.remove_writer(self._socket)
                if self._is_ending:
                    self._shut_down()

    def _send_unsent(self) -> None:
        try:
            while self._unsent:
                with memoryview(self._unsent) as unsent:
                    sent = self._socket.send(unsent[:_MOST_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed already
            self._socket.shutdown(socket.SHUT_WR)

    def _read(self) -> None:
        try:
            part = self._socket.recv(_MOST_BYTES)
            self._received += part
            while part and len(self._received) >= _HEADER.size:
                kind, size = _HEADER.unpack_from(self._received)
                if len(self._received) < _HEADER.size + size:
                    break
                payload = bytes(self._received[_HEADER.size : _HEADER.size + size])
                del self._received[: _HEADER.size + size]
                self._take(PacketKind(kind), payload)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        except ValueError:  # not a packet
            logger.exception("a packet of another rank cannot be read")
            part = b""
        if not part and not self.is_over:
            self.close()
            self._end()


def encode_packet(kind: PacketKind, payload: bytes = b"") -> bytes:
    return _HEADER.pack(kind, len(payload)) + payload


_HEADER = struct.Struct("!BQ")
_MOST_BYTES = 1 << 20


def _decoded(heartbeat: bytes) -> tuple[int, WaitStatus, str, str]:
    number, wait, last_activity, line = json.loads(heartbeat)
    return number, WaitStatus(*wait), last_activity, line


def _packed(parts: Sequence[bytes]) -> bytes:
    return struct.pack(f"!I{len(parts)}Q", len(parts), *map(len, parts)) + b"".join(parts)


def _unpacked(packed: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("!I", packed)
    sizes, start, parts = struct.unpack_from(f"!{count}Q", packed, 4), 4 + 8 * count, []
    for size in sizes:
        parts.append(packed[start : start + size])
        start += size
    return parts


_GREETING = struct.Struct("!I16s32s")
"""A rank, a nonce, and the proof that the rank knows the secret."""


def greet(connection: socket.socket, rank: int, secret: bytes) -> None:
    """Prove to rank 0 that this rank knows the secret. Raises OSError if the other end does not know it."""
    nonce, answer = secrets.token_bytes(16), b""
    expected = _proof(secret, b"rank 0", rank, nonce)
    connection.sendall(_GREETING.pack(rank, nonce, _proof(secret, b"rank", rank, nonce)))
    while part := connection.recv(len(expected) - len(answer)):
        answer += part
    if not hmac.compare_digest(answer, expected):
        raise ConnectionRefusedError(f"another process listens at {connection.getpeername()}")


def _proof(secret: bytes, role: bytes, rank: int, nonce: bytes) -> bytes:
    return hmac.digest(secret, struct.pack("!I", rank) + nonce + role, "sha256")


_LONGEST_INTERVAL = 1.0
"""Maximum seconds between two heartbeats."""

_POLL_SECONDS = 0.1
_FLUSH_SECONDS = 0.005
_GREETING_SECONDS = 5.0
_JOIN_SECONDS = 2.0

_ARRIVAL_SECONDS = 1.0
"""Seconds after the end of a script in which what other ranks sent before may still arrive."""

_STATUS_SECONDS = 1.0
"""Ranks learn of a failure at once, unless they are in the middle of a long compute."""

_OF_THIS_PROCESS: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def close_in_forks(connection: socket.socket) -> None:
    """Close a forked process's copy of a socket, which would keep it open after this process has died."""
    _OF_THIS_PROCESS.add(connection)


def _close_in_child() -> None:
    """Let the copies refer to /dev/null, so that closing their numbers again closes no other file."""
    with open(os.devnull, "rb") as nothing:
        for each in list(_OF_THIS_PROCESS):
            if each.fileno() >= 0:
                os.dup2(nothing.fileno(), each.fileno(), inheritable=False)
    _OF_THIS_PROCESS.clear()


os.register_at_fork(after_in_child=_close_in_child)
