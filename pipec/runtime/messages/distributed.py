"""The transport between processes: torch.distributed, with gloo for CPU ranks and NCCL for CUDA ranks.

What computes of CPU ranks make for each other goes through memory that both have, where they are on one host.

The transport makes connections of its own. From the default process group it takes the members and the
store alone, so that closing the connections leaves that group open.

A rank that fails tells the others why, over their lifelines, and then closes its connections. The others
notice the closed connections at once, wherever they wait, and say what the lifelines know: which rank failed
and why, or which one died or is stopped.
"""

import functools
import hashlib
import itertools
import multiprocessing.util
import pickle
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipec.errors import PipecError, TransportError
from pipec.ir import Instruction, Link, Op, Payload, Program, Sizes
from pipec.ir.text import format_link
from pipec.runtime.messages.buffers import Buffer, Memory, buffers_for, values_in
from pipec.runtime.messages.connections import Connections, Direction, GlooConnections
from pipec.runtime.messages.cuda import current_device
from pipec.runtime.messages.group import Group
from pipec.runtime.messages.host_sockets import connect_all
from pipec.runtime.messages.hosts_group import HostsGroup
from pipec.runtime.messages.nccl import NcclConnections
from pipec.runtime.messages.outbox import Outbox
from pipec.runtime.messages.parcels import Parcel, Parcels
from pipec.runtime.messages.processes_group import ProcessesGroup
from pipec.runtime.messages.shared_memory import SharedMemory
from pipec.runtime.messages.sockets import Socket
from pipec.runtime.messages.transport import Receiver, Send
from pipec.runtime.processes.launch import world
from pipec.runtime.processes.rendezvous import bounded, meet
from pipec.runtime.processes.stops import STOPS
from pipec.runtime.processes.waits import names

T = TypeVar("T")

_transport_numbers = itertools.count()
"""Numbers the transports of a process, so that each has its own part of the store.

The number means the same transport on every rank, because all ranks make theirs in the same order.
"""


class TorchDistributed:
    """The transport of this process's rank. All ranks make theirs, and call ``connect``, in the same order.

    It uses the default process group; if there is none, it makes one from the environment that ``torchrun``
    sets. A wait of more than ``timeout`` seconds is an error. After an error the transport stays closed,
    while the process group stays usable.
    """

    def __init__(self, device: torch.device, timeout: float = 300.0) -> None:
        here = world()
        self.rank, self.num_ranks = here.rank, here.size
        self.device = device
        self._timeout = timeout
        self._lifelines, store = meet(here, next(_transport_numbers), timeout)
        multiprocessing.util.Finalize(self, self._lifelines.close, exitpriority=0)
        self._buffers: dict[tuple[Link, int, int], list[Buffer]] = {}
        self._outboxes: dict[tuple[Link, int], Outbox] = {}
        self._collectives = ThreadPoolExecutor(1, "pipec collectives")
        if not dist.is_initialized():
            join = functools.partial(
                dist.init_process_group,
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=timedelta(seconds=timeout),
            )
            self.making("the process group", join)
        self._connections: Connections = (
            NcclConnections(device, self.rank, self.num_ranks, timeout, self._lifelines.has_failed)
            if device.type == "cuda"
            else self.gloo_connections()
        )
        self._shared = SharedMemory(self.rank, timeout)
        self._near: dict[int, Socket] = {}
        self._lifelines.on_failure = self._close

    def gloo_connections(self) -> GlooConnections:
        """Connections of CPU tensors. All ranks make theirs in the same order."""
        make = functools.partial(GlooConnections, self.rank, self.num_ranks, self._timeout)
        return self.making("the gloo connections", make)

    def near(self) -> Mapping[int, Socket]:
        """A socket to each rank of this host. Every rank calls this once."""
        found = connect_all(self.rank, self.num_ranks, self._timeout, self.gather)
        self._near = {peer: Socket(each) for peer, each in found.items()}
        return self._near

    def making(self, what: str, make: Callable[[], T], num_parts: int = 1) -> T:
        """What ``make`` returns, which all ranks call together. Each of its parts may take the timeout.

        Raises:
            TransportError: some rank did not take part, or died.
        """
        doing = f"making {what} together with all ranks"
        try:
            with self._lifelines.waiting(doing):
                return bounded(make, num_parts * self._timeout, self._lifelines.check)
        except (
            TimeoutError,
            ConnectionError,
            RuntimeError,
        ) as error:  # of a store or connection that is gone
            failure = self.explained(error, doing, None)
            self._lifelines.fail(str(failure))
            raise failure from failure.__cause__

    def connect(self, programs: Sequence[Program], groups: Sequence[Sequence[int]], text: str) -> None:
        """Check that every rank holds the same ``text``, then open the connections that ``programs`` use.

        ``groups`` are the ranks of their collectives.

        Raises:
            TransportError: the ranks hold different texts, or a connection cannot be opened.
        """
        self.agree(text)
        directions, has_last = _directions(programs)
        if isinstance(self._connections, GlooConnections):
            self._shared.open(directions, self.gather)

        def connect() -> None:
            with current_device(self.device):
                self._connections.open(directions)
                self._connections.gather(tuple(ranks) for ranks in groups)
                if has_last:
                    self._connections.open_last()

        self.making("the connections of the programs", connect, 2 + len(directions) + len(groups))

    def agree(self, text: str) -> None:
        """Check that every rank calls this with the same text.

        Raises:
            TransportError: some ranks hold another text, or did not answer. Every rank raises it.
        """
        _check_equal(self.gather(hashlib.sha256(text.encode()).hexdigest()))

    def gather(self, text: str) -> list[str]:
        """The text of each rank, on every rank.

        Raises:
            TransportError: some ranks did not answer.
        """
        return [part.decode() for part in self._lifelines.gather(text.encode())]

    def told(self, text: str, doing: str) -> list[str]:
        """The text of each rank, on every rank, however long they take while all of them live."""
        self._lifelines.tell(text.encode())
        every = range(self.num_ranks)
        return [text if rank == self.rank else self._lifelines.heard(rank, doing).decode() for rank in every]

    def last_words(self, text: str) -> dict[int, str | None]:
        """The text of each other rank that lives when the pipeline cannot go on; None if it tells none."""
        return self._lifelines.last_words(text, _LAST_WORDS_COME_WITHIN)

    def told_aside(self, text: str) -> list[str]:
        """As ``told``, for a thread beside the one that steps. Raises TransportError if a process ends."""
        return [part.decode() for part in self._lifelines.exchange_aside(text.encode())]

    def check_processes(self) -> None:
        """Raise TransportError if the process of another rank has ended, even if a step has failed before."""
        self._lifelines.check_processes()

    def once(self, request: str, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 alone; every rank returns its result, or raises its error.

        If the ranks do not all call this with the same ``request``, all of them raise TransportError.
        """
        self.agree(request)
        with STOPS.acting_at_once():
            if self.rank == 0:
                with self._lifelines.interrupted_by_failures():
                    made = pickle.dumps(_outcome(make))
                self._lifelines.tell(made)
            else:
                made = self._lifelines.heard(0, "waiting for rank 0 to compile", expected=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, when it restores a TreeSpec
            result, error = pickle.loads(made)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def sender(self, instruction: Instruction, tag: int) -> Send:
        assert instruction.link is not None
        peer, key = instruction.peer, (instruction.link, instruction.peer)
        sending = self.explaining(f"sending {_message(instruction)} to rank {peer}", peer)
        if shared := self._shared.sender(instruction, tag, sending):
            return shared
        if key not in self._outboxes:
            self._outboxes[key] = Outbox(instruction.link, self.device)
        messages = self._outboxes[key].messages
        start = self._connections.send_last if _is_read_last(instruction) else self._connections.send

        def send(tensors: Sequence[Tensor], sizes: Sizes) -> None:
            with sending:
                start(messages(tensors, sizes), peer, tag)

        return send

    def receiver(self, instruction: Instruction, tag: int) -> Receiver:
        assert instruction.link is not None
        key = instruction.link, instruction.peer, instruction.slot
        doing = f"receiving {_message(instruction)} from rank {instruction.peer}"
        receiving = self.explaining(doing, instruction.peer)
        if shared := self._shared.receiver(instruction, tag, receiving):
            return shared
        if key not in self._buffers:
            self._buffers[key] = buffers_for(instruction, self.device)
        return _Receiver(instruction, tag, self._buffers[key], receiving)

    def held(self) -> Sequence[Tensor]:
        buffers: list[Buffer | Outbox] = [*itertools.chain(*self._buffers.values()), *self._outboxes.values()]
        return [memory for each in buffers for memory in each.held()] + self._shared.held()

    def group(self, ranks: Sequence[int], num_hosts: int = 1) -> Group:
        """These ranks, of which this one is one, for collectives. NCCL itself knows what is on which host."""
        members, others = tuple(ranks), [rank for rank in ranks if rank != self.rank]
        doing = f"meeting {names(others)} in a collective"
        index, explaining = members.index(self.rank), functools.partial(self.explaining, doing)
        if num_hosts > 1 and isinstance(self._connections, GlooConnections):
            background = self._collectives
            return HostsGroup(index, members, num_hosts, explaining, self._connections, background)
        return ProcessesGroup(index, members, explaining)

    def finish(self) -> None:
        with self.explaining("finishing the step") as connections:
            connections.drain()

    def check(self) -> None:
        with self.explaining("computing") as connections:
            connections.check()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks the reason, unless one of them failed before; then close."""
        known = self._lifelines.reason() if isinstance(error, TransportError) else None
        self._lifelines.fail(known or (str(error) if isinstance(error, PipecError) else repr(error)))
        self._close()

    def _close(self) -> None:
        for near in self._near.values():
            near.close()
        self._shared.close()
        self._connections.close()

    def explaining(self, doing: str, peer: int | None = None) -> "_Explaining":
        """What is around something that connections do: it gives them, and explains their errors.

        ``peer`` is the rank that must do something for this to end.
        """
        return _Explaining(self, self._connections, self._lifelines.waiting(doing, peer), doing, peer)

    def explained(self, error: Exception, doing: str, peer: int | None) -> TransportError:
        """What to raise for an error of torch's, which stays the cause only where nothing better is known."""
        is_lost = not isinstance(error, TimeoutError)
        reason = self._lifelines.reason(_REASON_COMES_WITHIN if is_lost else 0.0) or self._lifelines.silent()
        if reason is not None:
            return TransportError(
                f"another rank failed while this one was {doing}:\n{textwrap.indent(reason, '  ')}"
            )
        failure = TransportError(
            f"the connection was lost while {doing}, although all processes live; see the network"
            if is_lost
            else f"{doing}, took more than {self._timeout:g} s; {self._lifelines.waits_for(peer)}"
        )
        failure.__cause__ = error
        return failure


_REASON_COMES_WITHIN = 0.5
"""Seconds. A process that dies, or fails, closes connections of several kinds one after the other."""


_LAST_WORDS_COME_WITHIN = 1.0
"""Seconds. Ranks learn of a failure at once, unless they are in the middle of a long compute."""


def _outcome(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except PipecError as error:
        return None, error
    except Exception as error:  # of a class that other ranks may not know
        return None, PipecError(f"rank 0: {type(error).__name__}: {error}")


class _Explaining:
    """Turns errors of connections into a TransportError that tells what was going on.

    One that is around the messages of an instruction is entered each time anew, by one thread.
    """

    def __init__(
        self,
        transport: TorchDistributed,
        connections: Connections,
        waiting: AbstractContextManager[None],
        doing: str,
        peer: int | None,
    ) -> None:
        self._transport, self._connections, self._waiting = transport, connections, waiting
        self._doing, self._peer = doing, peer

    def __enter__(self) -> Connections:
        self._waiting.__enter__()
        return self._connections

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._waiting.__exit__(None, None, None)
        if isinstance(error, TimeoutError | ConnectionError):
            failure = self._transport.explained(error, self._doing, self._peer)
            raise failure from failure.__cause__


class _Receiver:
    """One receive instruction. All receives into the same slot share its buffers."""

    def __init__(
        self, instruction: Instruction, tag: int, buffers: Sequence[Buffer], explaining: _Explaining
    ) -> None:
        assert instruction.link is not None
        self._peer, self._tag, self._buffers, self._explaining = instruction.peer, tag, buffers, explaining
        self._parcels = Parcels(instruction.link)
        self._is_last = _is_read_last(instruction)
        self._posted: list[tuple[Parcel, Memory]] = []

    def post(self, sizes: Sizes) -> None:
        with self._explaining as connections:
            receive = connections.receive_last if self._is_last else connections.receive
            for parcel, buffer in zip(self._parcels.of(sizes), self._buffers, strict=False):
                buffer.settle(connections)
                memory = buffer.memory(parcel.num_bytes)
                if parcel.num_bytes:
                    buffer.arriving = receive(memory.message(parcel), self._peer, self._tag)
                self._posted.append((parcel, memory))

    def wait(self) -> Sequence[Tensor]:
        """Make the values first: the rank has nothing else to do until they are there."""
        posted, self._posted = self._posted, []
        values = values_in(posted)
        with self._explaining as connections:
            for buffer in self._buffers:
                if buffer.arriving is not None:
                    connections.wait(buffer.arriving)
                    buffer.arriving, buffer.settling = None, None if self._is_last else buffer.arriving
        return values


def _message(instruction: Instruction) -> str:
    assert instruction.link is not None
    of = f" of microbatch {instruction.microbatch}" if instruction.microbatch != -1 else ""
    return format_link(instruction.link) + of


def _is_read_last(instruction: Instruction) -> bool:
    """Whether what is sent or received is for those who wait when the program is over."""
    return instruction.link is not None and instruction.link.payload is Payload.RESULT


def _directions(programs: Sequence[Program]) -> tuple[set[Direction], bool]:
    """Between which ranks the programs send, and whether they also send what is read last."""
    sends = {
        (program.rank, each.peer, _is_read_last(each))
        for program in programs
        for each in program.instructions
        if each.op is Op.SEND
    }
    return {(rank, peer) for rank, peer, is_last in sends if not is_last}, any(last for *_, last in sends)


def _check_equal(digests: Sequence[str]) -> None:
    """Raise TransportError unless the ranks' digests of their texts are all equal."""
    holders = defaultdict(list)
    for rank, digest in enumerate(digests):
        holders[digest].append(rank)
    if len(holders) > 1:
        held = "; ".join(f"{digest[:8]} on {names(ranks)}" for digest, ranks in holders.items())
        raise TransportError(
            f"the ranks do not hold the same plan, programs and stage sources: {held}; start every rank with "
            "the same script, arguments, input shapes and versions"
        )
