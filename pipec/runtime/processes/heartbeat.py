"""Heartbeat connections between all pairs of ranks tell each rank who is alive, who failed, and who waits.

They carry no tensors. A thread in each process sends heartbeats, and reads the other ranks' packets:

* If a process dies, its connections close. The others know at once which one died.
* If a process is stopped, or its machine is lost, its heartbeats stop. The others know after the timeout.
* A rank that fails sends the reason. A rank whose script ends, or that frees its pipeline, sends CLEAN_CLOSE.
* A rank that waits sends the rank it waits for, so that an error can name the rank at the end of the chain.
* A wait for messages of a program fails after the timeout. While the rank at the end of its chain is between
  two calls, for example to save, no time counts.

Ranks also exchange texts here outside of steps. Torch's store, which is in the process of rank 0, is used for
the ranks' addresses alone.
"""

import asyncio
import contextlib
import functools
import hmac
import json
import math
import os
import signal
import struct
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass

from pipec.errors import TransportError
from pipec.runtime.processes.addresses import Address, listen
from pipec.runtime.processes.packets import PacketKind, encode_packet, read_packet
from pipec.runtime.processes.peers import Peers
from pipec.runtime.processes.stall_reports import (
    CurrentWait,
    StallReporter,
    WaitLimit,
    WaitScope,
    WaitStatus,
    describe_overdue_wait,
)
from pipec.runtime.processes.whereabouts import IN_A_CALL, Whereabouts, whereabouts


class HeartbeatConnections:
    """The connections of one rank. Another thread calls ``on_failure`` once the pipeline cannot go on.

    Give ``address`` to all higher ranks and ``connect`` to all lower ranks; then call ``wait_for_all``.
    ``overdue`` is a wait of this rank that failed after the timeout: its activity and its chain of waits.
    """

    def __init__(self, rank: int, num_ranks: int, timeout: float) -> None:
        self.rank = rank
        self.on_failure: Callable[[], None] = lambda: None
        self._timeout = timeout
        self._interval = min(_LONGEST_INTERVAL, timeout / 5)
        self._peers = Peers(rank, num_ranks, timeout, self._interval)
        self._waits = CurrentWait()
        self._stalls = StallReporter(rank, timeout)
        self._wait_limit = WaitLimit(timeout, self._interval)
        self.overdue: tuple[str, str] | None = None
        self._failure: str | None = None
        self._interrupting = False
        self._changed = threading.Condition(threading.RLock())
        self._server, self.address = listen()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="pipec heartbeats", daemon=True)
        self._thread.start()
        _OPEN_CONNECTIONS.add(self)

    def connect(self, peer: int, address: Address) -> None:
        """Connect to a lower rank. Raises TransportError if its process cannot be reached."""
        connecting = asyncio.run_coroutine_threadsafe(self._connect(peer, address), self._loop)
        try:
            connecting.result(self._timeout)
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            connecting.cancel()
            what = "is stopped" if isinstance(error, TimeoutError) else "died"
            raise TransportError(
                f"rank {self.rank} cannot reach rank {peer} at {address}: its process {what}, or the network "
                f"between them is closed ({str(error) or type(error).__name__})"
            ) from None

    def wait_for_all(self) -> None:
        """Wait until every rank is connected. Raises TransportError, which names the missing ranks."""
        peers = self._peers
        self._wait(
            lambda: [rank for rank, peer in peers.items() if peer.writer is None],
            lambda _: peers.not_connected(),
            self._timeout,
        )

    def all_gather_text(self, text: bytes) -> list[bytes]:
        """The texts of all ranks, by rank. Raises TransportError, which names the missing ranks."""
        self.send_text(text)
        with self.waiting(activity := "comparing calls with all ranks"):
            missing = functools.partial(self._peers.without, PacketKind.TEXT)
            self._wait(missing, lambda ranks: self._peers.unanswered(ranks, activity), self._timeout)
        return self._read_all(PacketKind.TEXT, text)

    def send_text(self, text: bytes) -> None:
        """Send a text to every other rank, which gets it by ``receive_text`` or ``all_gather_text``."""
        self._send(PacketKind.TEXT, text)

    def receive_text(self, peer: int, activity: str, expected: bool = False) -> bytes:
        """The next text of a rank; waits without a limit while all ranks are alive. Raises TransportError.

        A wait that is ``expected`` to take long is not reported on the console.
        """
        texts = self._peers[peer].received[PacketKind.TEXT]
        with self.waiting(activity, peer, expected):
            self._wait(lambda: [] if texts else [peer], lambda _: "", None)
        return texts.popleft()

    def channel(self, peer: int, kind: PacketKind) -> "HeartbeatChannel":
        """Messages of a kind to and from one rank."""
        return HeartbeatChannel(self, peer, kind)

    def exchange_final_status(self, text: str, within: float) -> dict[int, str | None]:
        """The final statuses of living ranks, exchanged when the pipeline cannot go on.

        None for a living rank that sent nothing ``within`` so many seconds.
        """
        self._send(PacketKind.FINAL_STATUS, text.encode())
        with self._changed:
            self._changed.wait_for(lambda: not self._peers.without_final_status(), within)
            silent = dict.fromkeys(self._peers.without_final_status())
            statuses = {rank: peer.final_status for rank, peer in self._peers.items()}
            return silent | {rank: status for rank, status in statuses.items() if status is not None}

    def all_gather_text_in_background(self, text: bytes) -> list[bytes]:
        """The texts of all ranks, by rank, for a background thread.

        Waits without a limit, even if a step fails meanwhile. Raises TransportError if a process ends.
        """
        self._send(PacketKind.BACKGROUND_TEXT, text)
        with self._changed:
            while self._peers.without(PacketKind.BACKGROUND_TEXT):
                self.check_processes()
                self._changed.wait(_POLL_SECONDS)
        return self._read_all(PacketKind.BACKGROUND_TEXT, text)

    def check_processes(self) -> None:
        """Raise TransportError if the process of a rank ended or is stopped."""
        if reason := self._peers.ended(self._peers, _ARRIVAL_SECONDS) or (self._failure and self.silent()):
            raise TransportError(f"the process of another rank ended:\n{textwrap.indent(reason, '  ')}")

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

    def fail(self, reason: str) -> None:
        """Send every rank the reason why this one cannot go on, unless a failure is known already."""
        reason = reason if reason.startswith("rank ") else f"rank {self.rank}: {reason}"
        with self._changed:
            first, self._failure = self._failure is None, self._failure or reason
        if first:
            self._send(PacketKind.FAILURE, reason.encode())

    def has_failed(self) -> bool:
        return self._failure is not None

    def check(self) -> None:
        """Raise TransportError if the ranks cannot all go on."""
        if reason := self.reason():
            raise self._failure_error(reason)

    def reason(self, within: float = 0.0) -> str | None:
        """The reason why the ranks cannot go on; None if it is not known ``within`` so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, within)
            return self._failure or self._peers.ended(self._peers)

    def silent(self) -> str | None:
        """A description of the ranks that seem dead before the timeout; None without one."""
        return self._peers.silent()

    def waits_for(self, peer: int | None) -> str:
        """A description of the chain of waits that begins at ``peer``; see ``Peers.waits_for``."""
        return self._peers.waits_for(peer, self._waits.now.activity)

    def waiting(
        self, activity: str, peer: int | None = None, expected: bool = False, limited: bool = False
    ) -> WaitScope:
        """Inside a ``with``, heartbeats carry this rank's activity and the rank that it waits for."""
        return WaitScope(self._waits, activity, peer, expected, limited)

    def note_progress(self) -> None:
        """Count a limited wait from now: something that it waits for has arrived."""
        self._wait_limit.restart()

    def close(self) -> None:
        """Send CLEAN_CLOSE, and end the thread."""
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def close_in_child(self) -> None:
        """Close a forked process's copies of the connections, which would outlive this process.

        Each file descriptor then refers to /dev/null, so that closing its number again closes no other file.
        """
        writers = [peer.writer for peer in self._peers.values() if peer.writer is not None]
        with open(os.devnull, "rb") as nothing:
            for copy in (self._server, *(writer.get_extra_info("socket") for writer in writers)):
                if copy.fileno() >= 0:
                    os.dup2(nothing.fileno(), copy.fileno(), inheritable=False)

    # Run on the calling thread.

    def _receive(self, peer: int, kind: PacketKind) -> bytes:
        """The next packet of a kind from a rank. Raises ConnectionError if a rank failed."""
        arrived = self._peers[peer].received[kind]
        with self._changed:
            while not arrived:
                if self._failure or self._peers.ended(self._peers, _ARRIVAL_SECONDS):
                    raise ConnectionError("a rank failed")
                self._changed.wait(_POLL_SECONDS)
            return arrived.popleft()

    def _wait(
        self, missing: Callable[[], list[int]], describe: Callable[[list[int]], str], limit: float | None
    ) -> None:
        """Wait until no ranks are ``missing()``.

        Raises TransportError if a rank failed, or after ``limit`` seconds. Only the time counts in which a
        missing rank is not held up by one that is between two calls.
        """
        deadline = math.inf if limit is None else time.monotonic() + limit
        with self._changed:
            while ranks := missing():
                if reason := self._failure or self._peers.ended(self._peers, _ARRIVAL_SECONDS):
                    raise self._failure_error(reason)
                if limit is not None and all(map(self._peers.is_held_up, ranks)):
                    deadline = time.monotonic() + limit
                elif time.monotonic() > deadline:
                    if silent := self._peers.silent():
                        raise self._failure_error(silent)
                    self.fail(describe(ranks))
                    raise TransportError(describe(ranks))
                self._changed.wait(_POLL_SECONDS)

    def _read_all(self, kind: PacketKind, own: bytes) -> list[bytes]:
        """The next packet of a kind from each rank, by rank; all have arrived."""
        return [
            self._peers[rank].received[kind].popleft() if rank in self._peers else own
            for rank in range(len(self._peers) + 1)
        ]

    def _failure_error(self, reason: str) -> TransportError:
        """The error for the failure of another rank, after sending it to all ranks."""
        self.fail(reason)
        return TransportError(f"another rank failed:\n{textwrap.indent(reason, '  ')}")

    # Run on the heartbeat thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
            for task in (tasks := asyncio.all_tasks(self._loop)):
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            self._loop.close()

    async def _live(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._server)
        beating = asyncio.create_task(self._beat())
        await self._closing.wait()
        beating.cancel()
        server.close()
        self._write_all(PacketKind.CLEAN_CLOSE, b"")
        writers = [peer.writer for peer in self._peers.values() if peer.writer is not None]
        for writer in writers:
            writer.close()
        await asyncio.wait([asyncio.ensure_future(w.wait_closed()) for w in writers] or [beating], timeout=1)

    async def _connect(self, peer: int, address: Address) -> None:
        hello = encode_packet(PacketKind.HELLO, struct.pack("!I", self.rank) + address.secret)
        reader, writer = await address.connect(hello, encode_packet(PacketKind.HELLO))
        self._follow(peer, reader, writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            _, hello = await asyncio.wait_for(
                read_packet(reader, len(self.address.secret) + 4), self._timeout
            )
            (peer,) = struct.unpack("!I", hello[:4])
            other = self._peers.get(peer)
            if other is None or other.writer or not hmac.compare_digest(hello[4:], self.address.secret):
                raise ConnectionError("not a rank of this pipeline")
        except (OSError, EOFError, ValueError, struct.error, TimeoutError):
            writer.close()
            return
        writer.write(encode_packet(PacketKind.HELLO))
        self._follow(peer, reader, writer)

    def _follow(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._changed:
            self._peers[rank].writer = writer
            self._changed.notify_all()
        self._peers[rank].listening = asyncio.ensure_future(self._listen(rank, reader))

    async def _listen(self, rank: int, reader: asyncio.StreamReader) -> None:
        """Read a rank's packets until its connection ends."""
        peer = self._peers[rank]
        with contextlib.suppress(OSError, EOFError, ValueError):
            while True:
                kind, payload = await read_packet(reader)
                with self._changed:
                    peer.missed_heartbeats = 0
                    if kind is PacketKind.HEARTBEAT:
                        peer.waiting_for, peer.activity, peer.last_activity, where = json.loads(payload)
                        peer.whereabouts = Whereabouts(*where)
                    elif kind is PacketKind.CLEAN_CLOSE:
                        peer.closed_cleanly = True
                    elif kind is PacketKind.FINAL_STATUS:
                        peer.final_status = payload.decode()
                    elif kind is not PacketKind.FAILURE:
                        peer.received[kind].append(payload)
                    self._changed.notify_all()
                if kind is PacketKind.FAILURE:
                    self._set_failure(payload.decode())
        with self._changed:
            peer.ended_at = time.monotonic()
            self._changed.notify_all()

    async def _beat(self) -> None:
        """Send heartbeats, and count missing ones, except while this process is suspended."""
        while True:
            await asyncio.sleep(self._interval)
            living = [rank for rank in self._peers.living if self._peers[rank].writer]
            wait = self._waits.now
            here = IN_A_CALL if wait.activity else whereabouts()
            state = [wait.peer, wait.activity, self._waits.last_activity, astuple(here)]
            self._write_all(PacketKind.HEARTBEAT, json.dumps(state).encode())
            self._stalls.check(wait, self._peers.late, self.has_failed())
            if self._wait_limit.is_over(wait, functools.partial(self._peers.is_held_up, wait.peer)):
                self._fail_overdue(wait)
            if self._stalls.is_long() and (left := self._peers.left()):
                self._set_failure(left)
                self._write_all(PacketKind.FAILURE, left.encode())
            for rank in living:
                self._peers[rank].missed_heartbeats += 1
            if silent := [rank for rank in living if self._peers.silence(rank) >= self._timeout]:
                self._set_failure(silence := self._peers.silent_since(silent))
                # Ranks that are not connected with the silent ones yet cannot notice.
                self._write_all(PacketKind.FAILURE, silence.encode())
            died = [rank for rank, peer in self._peers.items() if not peer.closed_cleanly]
            if reason := self._peers.ended(died, _DEATH_SECONDS):
                self._set_failure(reason)
            self._interrupt_if_failed()

    def _fail_overdue(self, wait: WaitStatus) -> None:
        if self._failure is None and self._peers.silent() is None:
            chain = self._peers.waits_for(wait.peer, wait.activity)
            self.overdue = wait.activity, chain
            reason = f"rank {self.rank}: {describe_overdue_wait(wait.activity, self._timeout, chain)}"
            self._set_failure(reason)
            self._write_all(PacketKind.FAILURE, reason.encode())

    def _set_failure(self, reason: str) -> None:
        with self._changed:
            first, self._failure = self._failure is None, self._failure or reason
            self._changed.notify_all()
        if first:
            self.on_failure()

    def _interrupt_if_failed(self) -> None:
        with self._changed:
            if self._interrupting and (self._failure or self._peers.ended(self._peers, _ARRIVAL_SECONDS)):
                self._interrupting = False
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _on_interrupt(self, number: int, frame: object) -> None:
        """Handle SIGINT where Ctrl-C is ignored: only ``_interrupt_if_failed`` interrupts."""
        if not self._interrupting:
            raise KeyboardInterrupt

    def _send(self, kind: PacketKind, payload: bytes, to: Iterable[int] | None = None) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._write_all, kind, payload, to)

    def _write_all(self, kind: PacketKind, payload: bytes, to: Iterable[int] | None = None) -> None:
        """Write a packet to the ranks ``to``, or to all."""
        for peer in map(self._peers.__getitem__, self._peers if to is None else to):
            if peer.writer is not None and peer.ended_at is None:
                peer.writer.write(encode_packet(kind, payload))


@dataclass(frozen=True)
class HeartbeatChannel:
    """Messages of one kind to and from another rank, in the order in which they are sent."""

    _heartbeats: HeartbeatConnections
    _peer: int
    _kind: PacketKind

    def send(self, message: bytes) -> None:
        self._heartbeats._send(self._kind, message, to=[self._peer])

    def receive(self, num_bytes: int) -> bytes:
        """The next message, of ``num_bytes``. Raises ConnectionError if a rank failed."""
        return self._heartbeats._receive(self._peer, self._kind)


_LONGEST_INTERVAL = 1.0
"""Maximum seconds between two heartbeats."""

_POLL_SECONDS = 0.1
"""Seconds between two checks of a deadline."""

_ARRIVAL_SECONDS = 1.0
"""Seconds after the end of a rank in which earlier packets of other ranks may still arrive."""

_DEATH_SECONDS = 5.0
"""Seconds from the death of a rank until all messages fail. Messages with that rank fail by themselves."""

_JOIN_SECONDS = 2.0

_OPEN_CONNECTIONS: "weakref.WeakSet[HeartbeatConnections]" = weakref.WeakSet()


def _close_in_child() -> None:
    for heartbeats in list(_OPEN_CONNECTIONS):
        heartbeats.close_in_child()
    _OPEN_CONNECTIONS.clear()


os.register_at_fork(after_in_child=_close_in_child)
