"""A star: each rank has one connection, to rank 0, for life signs, failures and texts.

It carries no tensors. A thread in each process sends heartbeats, and reads the packets that arrive:

* If a process dies, its connection closes. Rank 0 knows at once, and tells all ranks which one died. If rank
  0 itself dies, all others see their own connection close.
* If a process is stopped, or its machine is lost, its heartbeats stop. It is named after the timeout.
* A rank that fails sends the reason; rank 0 hands the first one to all. A rank whose script ends, or that
  frees its pipeline, sends CLEAN_CLOSE, which is a failure only for ranks that still need it.
* A heartbeat says what its rank waits for. So rank 0 can name the rank at the end of a chain of waits once a
  wait has taken the timeout. While that rank is between two calls, for example to save, no time counts.

Ranks agree by way of rank 0: each sends bytes, and rank 0 answers all of them. Packets of one kind between
two ranks arrive in order.
"""

import asyncio
import contextlib
import json
import os
import pickle
import secrets
import signal
import socket
import struct
import sys
import textwrap
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from pipec.console import logger
from pipec.errors import TransportError
from pipec.runtime.processes.judge import NOT_WAITING, Judge, WaitStatus, format_ranks

T = TypeVar("T")


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


@dataclass
class _Comparison:
    """What rank 0 compares with the bytes of the other ranks, and its ``reply`` once it has them all."""

    own: bytes
    answer: Callable[[list[bytes]], bytes]
    reply: bytes | None = None


class Star:
    """The connection of one rank. The thread calls ``on_failure`` once the pipeline cannot go on.

    ``note`` ends the errors that name ranks. ``elsewhere`` says what the process does for other pipelines.

    Rank 0 calls ``accept`` and then ``wait_for_all``; the others ``follow`` rank 0.
    """

    def __init__(self, rank: int, num_ranks: int, timeout: float, note: str = "") -> None:
        self.rank, self.num_ranks, self._note = rank, num_ranks, note
        self.on_failure: Callable[[], None] = lambda: None
        self.elsewhere: Callable[[], str] = str
        self.wait_status, self.last_activity = NOT_WAITING, ""
        self._timeout, self._interval = timeout, min(_LONGEST_INTERVAL, timeout / 5)
        self._judge = Judge(rank, num_ranks, timeout, self._interval)
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._arrived: defaultdict[tuple[int, PacketKind], deque[bytes]] = defaultdict(deque)
        self._comparisons = deque[_Comparison]()
        self._failure: str | None = None
        self._ended, self._ended_at = "", 0.0
        self._wait_number, self._last_wait = 0, NOT_WAITING
        self._interrupting = False
        self._changed = threading.Condition(threading.RLock())
        self._server: socket.socket | None = None
        self._token = b""
        self._readers = set[asyncio.Task[None]]()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="pipec star", daemon=True)
        self._thread.start()

    # How ranks connect.

    def accept(self, server: socket.socket, token: bytes) -> None:
        """Let the other ranks, which know the token, connect from now on."""
        self._server, self._token = server, token
        self._on_thread(self._accept())

    def wait_for_all(self) -> None:
        """Wait on rank 0 until every rank is connected. Raises TransportError, which names missing ranks."""
        deadline = time.monotonic() + self._timeout
        with self._changed, self.waiting("waiting for all ranks to connect"):
            while missing := [rank for rank in range(1, self.num_ranks) if rank not in self._writers]:
                self.check()
                if time.monotonic() > deadline:
                    reason = (
                        f"rank 0 waited {self._timeout:g} s for {format_ranks(missing)}, which did not "
                        "connect: that process was not started, died or hangs before it makes its pipeline"
                    )
                    self.fail(reason)
                    raise TransportError(reason)
                self._changed.wait(_POLL_SECONDS)

    def follow(self, connection: socket.socket) -> None:
        """Read rank 0's packets from now on."""
        self._on_thread(self._join(0, connection)).result()

    # How ranks agree.

    def start_consulting(
        self,
        own: bytes,
        kind: PacketKind,
        activity: str,
        answer: Callable[[list[bytes]], bytes],
        limited: bool = True,
    ) -> Callable[[], bytes]:
        """Send bytes to rank 0; returns a function that waits for its ``answer`` to those of all ranks.

        Functions of one kind are called in the order in which they were made. Those of background threads
        tell no other rank that they wait, and wait while the processes live, even if a step has failed.

        Raises:
            TransportError: a rank failed or ended or, if the wait is ``limited``, did not answer.
        """

        def receive(peer: int) -> bytes:
            if kind is PacketKind.BACKGROUND_TEXT:
                return self.receive(peer, kind, of_processes=True)
            together = f"{activity}, together with rank {peer}"
            with self.waiting(together, peer, limited=limited):
                return self.receive(peer, kind, activity=together)

        if self.rank != 0:
            self.send(0, kind, own)
            return lambda: receive(0)

        def collect() -> bytes:
            reply = answer([own, *map(receive, range(1, self.num_ranks))])
            self.send_to_all(kind, reply)
            return reply

        return collect

    def start_comparing(
        self, own: bytes, activity: str, answer: Callable[[list[bytes]], bytes]
    ) -> Callable[[], bytes]:
        """As ``start_consulting``, but rank 0 answers as soon as it has the bytes of all ranks.

        It does so on the thread of its connections, whatever its other threads wait for.
        """
        kind = PacketKind.ANNOUNCEMENT
        if self.rank != 0:
            return self.start_consulting(own, kind, activity, answer)
        compared = _Comparison(own, answer)

        def wait() -> bytes:
            while compared.reply is None:
                peer = next((x for x in range(1, self.num_ranks) if not self._arrived[x, kind]), 0)
                arrived, together = self._arrived[peer, kind], f"{activity}, together with rank {peer}"
                with self.waiting(together, peer, limited=True):
                    self._wait_for(lambda: compared.reply or arrived, together)  # noqa: B023
            return compared.reply

        with self._changed:
            self._comparisons.append(compared)
            self._answer_comparisons()
        return wait

    def _answer_comparisons(self) -> None:
        """Answer what all ranks have sent their bytes for."""
        arrived = [self._arrived[peer, PacketKind.ANNOUNCEMENT] for peer in range(1, self.num_ranks)]
        while self._comparisons and all(arrived):
            compared = self._comparisons.popleft()
            compared.reply = compared.answer([compared.own, *(each.popleft() for each in arrived)])
            self.send_to_all(PacketKind.ANNOUNCEMENT, compared.reply)

    def all_gather(
        self, own: T, activity: str, limited: bool = True, kind: PacketKind = PacketKind.TEXT
    ) -> list[T]:
        """The value of each rank, by rank; see ``start_consulting``."""
        every = self.start_consulting(pickle.dumps(own), kind, activity, pickle.dumps, limited)()
        return [pickle.loads(each) for each in pickle.loads(every)]

    def send(self, peer: int, kind: PacketKind, payload: bytes) -> None:
        """Send a packet to rank 0, or from it, for ``receive``. It is dropped once a rank has ended."""
        assert 0 in (self.rank, peer), "ranks have connections to rank 0 alone"
        if (writer := self._writers.get(peer)) and not writer.is_closing():
            packet = encode_packet(kind, payload)
            if threading.current_thread() is self._thread:
                writer.write(packet)
            else:
                with contextlib.suppress(RuntimeError):  # the thread has ended
                    self._loop.call_soon_threadsafe(writer.write, packet)

    def send_to_all(self, kind: PacketKind, payload: bytes) -> None:
        """Send a packet from rank 0 to every other rank."""
        for peer in list(self._writers):
            self.send(peer, kind, payload)

    def receive(self, peer: int, kind: PacketKind, of_processes: bool = False, activity: str = "") -> bytes:
        """The next packet of a kind from a rank; waits while the ranks can go on.

        ``of_processes`` waits while the processes live, even if a step has failed.

        Raises:
            TransportError: a rank failed or ended.
        """
        arrived = self._arrived[peer, kind]
        with self._changed:
            self._wait_for(lambda: arrived, activity, of_processes)
            return arrived.popleft()

    def _wait_for(self, has_come: Callable[[], object], activity: str, of_processes: bool = False) -> None:
        """Wait for packets while the ranks can go on. Raises TransportError if they cannot."""
        reason = None
        with self._changed:
            while not has_come() and reason is None:
                reason = self._process_end() if of_processes else self._reason_to_stop()
                if reason is None:
                    self._changed.wait(_POLL_SECONDS if self._ended else None)
            if not has_come():
                raise self.error(reason or "", activity)

    def exchange_final_status(self, text: str) -> dict[int, str | None]:
        """The final statuses of other ranks, exchanged when the pipeline cannot go on.

        None for a rank that may live, and whose status rank 0 does not get within a second.
        """
        kind, answering = PacketKind.FINAL_STATUS, self._judge.answering
        told = {rank: self._arrived[rank, kind] for rank in range(self.num_ranks)}
        with self._changed:
            if self.rank != 0:
                self.send(0, kind, text.encode())
                self._changed.wait_for(lambda: told[0] or 0 not in answering(), 2 * _STATUS_SECONDS)
                statuses = pickle.loads(told[0].popleft()) if told[0] else dict.fromkeys(told)
            else:
                self._changed.wait_for(lambda: all(told[rank] for rank in answering()), _STATUS_SECONDS)
                found = {rank: told[rank].popleft().decode() if told[rank] else None for rank in answering()}
                statuses = found | {0: text}
                self.send_to_all(kind, pickle.dumps(statuses))
        return {rank: status for rank, status in statuses.items() if rank != self.rank}

    # Failures.

    def fail(self, reason: str) -> None:
        """Send every rank the reason why this one cannot go on, unless a failure is known already."""
        self._set_failure(reason if reason.startswith("rank ") else f"rank {self.rank}: {reason}")

    def check(self) -> None:
        """Raise TransportError if the ranks cannot all go on."""
        if reason := self.reason():
            raise self.error(reason)

    def check_processes(self) -> None:
        """Raise TransportError if the process of a rank ended or is stopped, even if a step has failed."""
        if reason := self._process_end():
            raise self.error(reason)

    def reason(self, within: float = 0.0) -> str | None:
        """The reason why the ranks cannot go on; None if it is not known ``within`` so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._ended, within)
            return self._failure or self._ended or None

    def error(self, reason: str, activity: str = "") -> TransportError:
        """The error to raise here for the reason why the ranks cannot go on."""
        own = f"rank {self.rank}: "
        if reason.startswith(own):
            return TransportError(reason.removeprefix(own) + self._note)
        self.fail(reason)
        while_doing = f" while this one was {activity}" * bool(activity)
        indented = textwrap.indent(reason, "  ")
        return TransportError(f"another rank failed{while_doing}:\n{indented}{self._note}")

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

        Raises TransportError then. On another thread, or if the program handles or ignores Ctrl-C itself, the
        next wait finds the failure instead.
        """
        is_main = threading.current_thread() is threading.main_thread()
        self._interrupting = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            try:
                self.check()  # an earlier failure interrupts nothing
                yield
            finally:
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

    def _on_thread(self, work: Coroutine[object, object, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # Run on the thread of the star.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    async def _live(self) -> None:
        beating = asyncio.create_task(self._beat())
        await self._closing.wait()
        beating.cancel()
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.write(encode_packet(PacketKind.CLEAN_CLOSE))
            with contextlib.suppress(OSError):  # the other end is closed already
                writer.write_eof()
        if self._readers:  # a peer that closes too has read everything
            await asyncio.wait(self._readers, timeout=_JOIN_SECONDS / 4)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        for writer in self._writers.values():
            writer.close()

    async def _accept(self) -> None:
        assert self._server is not None
        while not self._closing.is_set():
            try:
                connection, _ = await self._loop.sock_accept(self._server)
                greeting = self._loop.create_task(self._greet(connection))
                self._readers.add(greeting)
                greeting.add_done_callback(self._readers.discard)
            except OSError:  # such as no free file descriptor: the rank tries again
                await asyncio.sleep(_POLL_SECONDS)

    async def _greet(self, connection: socket.socket) -> None:
        """Follow a connection whose greeting has the token; close that of a stranger."""
        reader, writer = await _streams(connection)
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                rank, token = _GREETING.unpack(await reader.readexactly(_GREETING.size))
        except (OSError, EOFError):  # TimeoutError is an OSError
            rank, token = 0, b""
        if token != self._token[:_TOKEN_BYTES] or not 0 < rank < self.num_ranks or rank in self._writers:
            writer.close()
            return
        writer.write(self._token[_TOKEN_BYTES:])
        if self._failure is not None:
            writer.write(encode_packet(PacketKind.FAILURE, self._failure.encode()))
        await self._read(rank, reader, writer)

    async def _join(self, rank: int, connection: socket.socket) -> None:
        reader, writer = await _streams(connection)
        self._readers.add(self._loop.create_task(self._read(rank, reader, writer)))

    async def _read(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the packets of a rank until its connection ends."""
        with self._changed:
            self._writers[rank] = writer
            self._judge.join(rank)
            self._changed.notify_all()
        try:
            while True:
                kind, size = _HEADER.unpack(await reader.readexactly(_HEADER.size))
                self._take(rank, PacketKind(kind), await reader.readexactly(size))
        except (OSError, EOFError):
            pass
        except ValueError:
            logger.exception("a packet of another rank cannot be read")
        writer.close()
        if not self._closing.is_set():
            self._end(rank)

    def _take(self, rank: int, kind: PacketKind, payload: bytes) -> None:
        """Take a packet that arrived from ``rank``."""
        self._judge.heard(rank)
        match kind:
            case PacketKind.HEARTBEAT:
                number, wait, *others = json.loads(payload)
                self._judge.note(rank, number, WaitStatus(*wait), *others)
            case PacketKind.FAILURE:
                self._set_failure(payload.decode(), spread=self.rank == 0)
            case PacketKind.CLEAN_CLOSE:
                self._judge.close(rank)
            case PacketKind.ENDED:
                self._set_ended(payload.decode())
            case _:
                with self._changed:
                    self._arrived[rank, kind].append(payload)
                    self._answer_comparisons()
                    self._changed.notify_all()

    def _end(self, rank: int) -> None:
        """Note that a rank's connection has ended, and tell the others."""
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
            line = "" if wait.activity else self.elsewhere() or _line_of_script()
            state = self._wait_number, wait, self.last_activity, line
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


def _line_of_script() -> str:
    """The line of the script that the main thread runs, or "" while it is in a call of pipec."""
    frame, line = sys._current_frames().get(threading.main_thread().ident or 0), ""
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if isinstance(module, str) and module.partition(".")[0] == "pipec":
            return ""
        if module == "__main__" and not line:
            code = frame.f_code
            line = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return line or "an unknown line"


# Sockets and packets.


async def _streams(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    close_in_forks(connection)
    return await asyncio.open_connection(sock=connection, limit=1 << 20)


def encode_packet(kind: PacketKind, payload: bytes = b"") -> bytes:
    return _HEADER.pack(kind, len(payload)) + payload


_HEADER = struct.Struct("!BQ")


_TOKEN_BYTES = 16

_GREETING = struct.Struct(f"!I{_TOKEN_BYTES}s")
"""A rank, and the first half of the token, to which rank 0 answers with the second half."""


def new_token() -> bytes:
    """A token by which ranks tell each other from strangers at the same port."""
    return secrets.token_bytes(2 * _TOKEN_BYTES)


def greet(connection: socket.socket, rank: int, token: bytes) -> None:
    """Show rank 0 the token. Raises OSError if the other end does not know it."""
    connection.sendall(_GREETING.pack(rank, token[:_TOKEN_BYTES]))
    answer = b""
    while part := connection.recv(_TOKEN_BYTES - len(answer)):
        answer += part
    if answer != token[_TOKEN_BYTES:]:
        raise ConnectionRefusedError(f"another process listens at {connection.getpeername()}")


_LONGEST_INTERVAL = 1.0
"""Maximum seconds between two heartbeats."""

_POLL_SECONDS = 0.1
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
