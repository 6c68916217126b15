"""The transport between processes: torch.distributed, with gloo for CPU ranks and NCCL for CUDA ranks.

CPU ranks on one host exchange activations and gradients through shared memory.

The transport makes its own connections. It uses only the members and the store of the default process group,
so closing the connections leaves that group open.

A rank that fails sends the reason over the heartbeat connections, and then closes its connections. The other
ranks notice immediately, wherever they wait, and report which rank failed and why, or which one died or
hangs.
"""

import atexit
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

from pipec.errors import InputError, PipecError, TransportError
from pipec.ir import Instruction, Link, Op, Payload, Program, Sizes
from pipec.ir.text_format import format_link
from pipec.runtime.messages.collective_group import CollectiveGroup
from pipec.runtime.messages.connections import Connections, Direction, GlooConnections
from pipec.runtime.messages.cuda import current_device
from pipec.runtime.messages.distributed_group import DistributedGroup
from pipec.runtime.messages.hierarchical_group import HierarchicalGroup
from pipec.runtime.messages.host_sockets import connect_all
from pipec.runtime.messages.message_buffers import (
    MessageMemory,
    ReceiveBuffer,
    link_values,
    make_receive_buffers,
)
from pipec.runtime.messages.message_layout import MessageLayout, MessageLayouts
from pipec.runtime.messages.message_packing import MessagePacker
from pipec.runtime.messages.message_socket import MessageSocket
from pipec.runtime.messages.nccl import NcclConnections
from pipec.runtime.messages.shared_memory import SharedMemory
from pipec.runtime.messages.transport import Receiver, Send
from pipec.runtime.processes.heartbeat import HeartbeatChannel
from pipec.runtime.processes.launch import world
from pipec.runtime.processes.packets import PacketKind
from pipec.runtime.processes.rendezvous import call_with_timeout, connect_ranks
from pipec.runtime.processes.stall_reports import describe_overdue_wait, format_ranks
from pipec.runtime.processes.stop_signals import STOP_SIGNALS

T = TypeVar("T")

_transport_numbers = itertools.count()
"""Numbers the transports of a process, so that each has its own keys in the store.

A number identifies the same transport on every rank, because all ranks make transports in the same order.
"""


class DistributedTransport:
    """The transport of one rank. All ranks make transports, and call ``connect``, in the same order.

    It uses the default process group, or makes one from the environment that ``torchrun`` sets. A wait of
    more than ``timeout`` seconds is an error, which the heartbeats notice: the connections have no limits of
    their own. After an error the transport stays closed, while the process group stays usable.
    """

    def __init__(self, device: torch.device, timeout: float = 300.0) -> None:
        here = world()
        self.rank, self.num_ranks = here.rank, here.size
        self.device = device
        self._timeout = timeout
        self._heartbeats, store = connect_ranks(here, next(_transport_numbers), timeout)
        multiprocessing.util.Finalize(self, self._heartbeats.close, exitpriority=0)
        self._buffers: dict[tuple[Link, int, int], list[ReceiveBuffer]] = {}
        self._message_packers: dict[tuple[Link, int], MessagePacker] = {}
        self._collectives = ThreadPoolExecutor(1, "pipec collectives")
        if device.type == "cuda":
            require_own_gpus(self.all_gather_text(str(torch.cuda.get_device_properties(device).uuid)))
        if not dist.is_initialized():
            join = functools.partial(
                dist.init_process_group,
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.num_ranks,
                timeout=timedelta(seconds=timeout),
            )
            self.call_on_all_ranks("the process group", join)
            if device.type == "cuda":
                atexit.register(_leave_process_group)
        self._connections: Connections = (
            NcclConnections(
                device, self.rank, self.num_ranks, self._heartbeats.has_failed, self._heartbeats.note_progress
            )
            if device.type == "cuda"
            else self.gloo_connections()
        )
        self._shared = SharedMemory(self.rank)
        self._same_host: dict[int, MessageSocket] = {}
        self._heartbeats.on_failure = self._close

    def gloo_connections(self) -> GlooConnections:
        """Connections for CPU tensors. All ranks call this in the same order."""
        make = functools.partial(GlooConnections, self.rank, self.num_ranks)
        return self.call_on_all_ranks("the gloo connections", make)

    def connect_same_host(self) -> Mapping[int, MessageSocket]:
        """A socket to each other rank of this host. Every rank calls this once."""
        sockets = connect_all(self.rank, self.num_ranks, self.all_gather_text)
        self._same_host = {peer: MessageSocket(each) for peer, each in sockets.items()}
        return self._same_host

    def channel(self, peer: int, kind: PacketKind) -> HeartbeatChannel:
        """Messages of a kind to and from another rank, also of another host, beside those of programs."""
        return self._heartbeats.channel(peer, kind)

    def call_on_all_ranks(self, what: str, make: Callable[[], T], num_segments: int = 1) -> T:
        """The result of ``make``, which all ranks call together. Each of its segments may take the timeout.

        Raises:
            TransportError: some rank did not take part, or died.
        """
        activity = f"making {what} together with all ranks"
        try:
            with self._heartbeats.waiting(activity):
                return call_with_timeout(make, num_segments * self._timeout, self._heartbeats.check)
        except (
            TimeoutError,
            ConnectionError,
            RuntimeError,
        ) as error:  # the store or a connection is gone
            failure = self.transport_error(error, activity, None)
            self._heartbeats.fail(str(failure))
            raise failure from failure.__cause__

    def connect(self, programs: Sequence[Program], groups: Sequence[Sequence[int]], text: str) -> None:
        """Check that every rank has the same ``text``, then open the connections that ``programs`` use.

        ``groups`` are the ranks of their collectives.

        Raises:
            TransportError: the ranks hold different texts, or a connection cannot be opened.
        """
        self.require_same_text(text)
        directions, has_last = _directions(programs)
        if isinstance(self._connections, GlooConnections):
            self._shared.open(directions, self.all_gather_text)

        def connect() -> None:
            with current_device(self.device):
                self._connections.open(directions)
                self._connections.open_groups(tuple(ranks) for ranks in groups)
                if has_last:
                    self._connections.open_results()

        self.call_on_all_ranks("the connections of the programs", connect, 2 + len(directions) + len(groups))

    def require_same_text(self, text: str) -> None:
        """Check that every rank calls this with the same text.

        Raises:
            TransportError: some ranks hold another text, or did not answer. Every rank raises it.
        """
        _check_equal(self.all_gather_text(hashlib.sha256(text.encode()).hexdigest()))

    def all_gather_text(self, text: str) -> list[str]:
        """The text of each rank, on every rank.

        Raises:
            TransportError: some ranks did not answer.
        """
        return [part.decode() for part in self._heartbeats.all_gather_text(text.encode())]

    def all_gather_text_no_timeout(self, text: str, activity: str) -> list[str]:
        """The text of each rank, on every rank. Waits without a timeout while all ranks live."""
        self._heartbeats.send_text(text.encode())
        return [
            text if rank == self.rank else self._heartbeats.receive_text(rank, activity).decode()
            for rank in range(self.num_ranks)
        ]

    def exchange_final_status(self, text: str) -> dict[int, str | None]:
        """The text of each other living rank, after a failure of the pipeline; None if it sends none."""
        return self._heartbeats.exchange_final_status(text, _FINAL_STATUS_SECONDS)

    def all_gather_text_in_background(self, text: str) -> list[str]:
        """``all_gather_text_no_timeout`` for a background thread. Raises TransportError if a process ends."""
        return [part.decode() for part in self._heartbeats.all_gather_text_in_background(text.encode())]

    def check_processes(self) -> None:
        """Raise TransportError if the process of another rank has ended, even if a step has failed before."""
        self._heartbeats.check_processes()

    def call_on_rank_0(self, request: str, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 alone; every rank returns its result, or raises its error.

        If the ranks do not all call this with the same ``request``, all of them raise TransportError.
        """
        self.require_same_text(request)
        with STOP_SIGNALS.uninstalled():
            if self.rank == 0:
                with self._heartbeats.interrupted_by_failures():
                    made = pickle.dumps(_result_or_error(make))
                self._heartbeats.send_text(made)
            else:
                made = self._heartbeats.receive_text(0, "waiting for rank 0 to compile", expected=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, when it restores a TreeSpec
            result, error = pickle.loads(made)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def sender(self, instruction: Instruction, tag: int) -> Send:
        assert instruction.link is not None
        peer, key = instruction.peer, (instruction.link, instruction.peer)
        sending = self.error_context(f"sending {_message(instruction)} to rank {peer}", peer)
        if shared := self._shared.sender(instruction, tag, sending):
            return shared
        if key not in self._message_packers:
            self._message_packers[key] = MessagePacker(instruction.link, self.device)
        messages = self._message_packers[key].messages
        start = self._connections.send_result if _is_read_last(instruction) else self._connections.send

        def send(tensors: Sequence[Tensor], sizes: Sizes) -> None:
            with sending:
                start(messages(tensors, sizes), peer, tag)

        return send

    def receiver(self, instruction: Instruction, tag: int) -> Receiver:
        assert instruction.link is not None
        key = instruction.link, instruction.peer, instruction.slot
        activity = f"receiving {_message(instruction)} from rank {instruction.peer}"
        receiving = self.error_context(activity, instruction.peer)
        if shared := self._shared.receiver(instruction, tag, receiving):
            return shared
        if key not in self._buffers:
            self._buffers[key] = make_receive_buffers(instruction, self.device)
        return _Receiver(instruction, tag, self._buffers[key], receiving)

    def group(self, ranks: Sequence[int], num_hosts: int = 1) -> CollectiveGroup:
        """The group of these ranks, which include this one. NCCL itself knows which ranks share a host."""
        members, others = tuple(ranks), [rank for rank in ranks if rank != self.rank]
        activity = f"meeting {format_ranks(others)} in a collective"
        index, error_context = members.index(self.rank), functools.partial(self.error_context, activity)
        if num_hosts > 1 and isinstance(self._connections, GlooConnections):
            background = self._collectives
            return HierarchicalGroup(index, members, num_hosts, error_context, self._connections, background)
        return DistributedGroup(index, members, error_context)

    def finish(self) -> None:
        with self.error_context("finishing the step") as connections:
            connections.drain()

    def check(self) -> None:
        with self.error_context("computing") as connections:
            connections.check()

    def fail(self, error: BaseException) -> None:
        """Send the other ranks the reason, unless one of them failed first; then close."""
        known = self._heartbeats.reason() if isinstance(error, TransportError) else None
        self._heartbeats.fail(known or (str(error) if isinstance(error, PipecError) else repr(error)))
        self._close()

    def _close(self) -> None:
        for near in self._same_host.values():
            near.close()
        self._shared.close()
        self._connections.close()

    def error_context(self, activity: str, peer: int | None = None) -> "_ErrorContext":
        """A context for a use of the connections, which yields them and explains their errors.

        ``peer`` is the rank for which this one waits.
        """
        return _ErrorContext(
            self, self._connections, self._heartbeats.waiting(activity, peer, limited=True), activity, peer
        )

    def transport_error(self, error: Exception, activity: str, peer: int | None) -> TransportError:
        """The error to raise for an error of torch; that stays the cause only if no better one is known."""
        if self._heartbeats.overdue is not None:
            activity, chain = self._heartbeats.overdue
            return TransportError(describe_overdue_wait(activity, self._timeout, chain))
        is_lost = not isinstance(error, TimeoutError)
        reason = (
            self._heartbeats.reason(_REASON_COMES_WITHIN if is_lost else 0.0) or self._heartbeats.silent()
        )
        if reason is not None:
            return TransportError(
                f"another rank failed while this one was {activity}:\n{textwrap.indent(reason, '  ')}"
            )
        failure = TransportError(
            f"the connection was lost while {activity}, although all processes live; see the network"
            if is_lost
            else describe_overdue_wait(activity, self._timeout, self._heartbeats.waits_for(peer))
        )
        failure.__cause__ = error
        return failure


_REASON_COMES_WITHIN = 0.5
"""Seconds. A process that dies, or fails, closes connections of several kinds one after the other."""


_FINAL_STATUS_SECONDS = 1.0
"""Seconds. Ranks learn of a failure at once, unless they are in the middle of a long compute."""


def require_own_gpus(uuids: Sequence[str]) -> None:
    """Raise InputError if two ranks have the same GPU. Every rank calls this with the UUIDs of all GPUs."""
    ranks_by_gpu = defaultdict(list)
    for rank, uuid in enumerate(uuids):
        ranks_by_gpu[uuid].append(rank)
    for uuid, ranks in ranks_by_gpu.items():
        if len(ranks) > 1:
            raise InputError(
                f"{format_ranks(ranks)} have the same GPU, {uuid}, but NCCL needs one for each process; "
                "start fewer processes, or let each see one of its own (CUDA_VISIBLE_DEVICES, LOCAL_RANK)"
            )


def _leave_process_group() -> None:
    """Destroy the default process group: at the end of the script NCCL warns of one that is left."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _result_or_error(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except PipecError as error:
        return None, error
    except Exception as error:  # of a class that other ranks may not know
        return None, PipecError(f"rank 0: {type(error).__name__}: {error}")


class _ErrorContext:
    """Turns errors of connections into a TransportError that says what the rank was doing.

    The context of an instruction is entered again for each of its messages, by one thread.
    """

    def __init__(
        self,
        transport: DistributedTransport,
        connections: Connections,
        waiting: AbstractContextManager[None],
        activity: str,
        peer: int | None,
    ) -> None:
        self._transport, self._connections, self._waiting = transport, connections, waiting
        self._doing, self._peer = activity, peer

    def __enter__(self) -> Connections:
        self._waiting.__enter__()
        return self._connections

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._waiting.__exit__(None, None, None)
        if isinstance(error, TimeoutError | ConnectionError):
            failure = self._transport.transport_error(error, self._doing, self._peer)
            raise failure from failure.__cause__


class _Receiver:
    """One receive instruction. All receives into the same slot share its buffers."""

    def __init__(
        self,
        instruction: Instruction,
        tag: int,
        buffers: Sequence[ReceiveBuffer],
        error_context: _ErrorContext,
    ) -> None:
        assert instruction.link is not None
        self._peer, self._tag, self._buffers, self._error_context = (
            instruction.peer,
            tag,
            buffers,
            error_context,
        )
        self._message_layouts = MessageLayouts(instruction.link)
        self._is_last = _is_read_last(instruction)
        self._posted: list[tuple[MessageLayout, MessageMemory]] = []

    def post(self, sizes: Sizes) -> None:
        with self._error_context as connections:
            receive = connections.receive_result if self._is_last else connections.receive
            for message_layout, buffer in zip(self._message_layouts.of(sizes), self._buffers, strict=False):
                buffer.synchronize(connections)
                memory = buffer.memory(message_layout.num_bytes)
                if message_layout.num_bytes:
                    buffer.pending = receive(memory.message(message_layout), self._peer, self._tag)
                self._posted.append((message_layout, memory))

    def wait(self) -> Sequence[Tensor]:
        """Prepare the values first: the rank has nothing else to do until the message arrives."""
        posted, self._posted = self._posted, []
        values = link_values(posted)
        with self._error_context as connections:
            for buffer in self._buffers:
                if buffer.pending is not None:
                    connections.wait(buffer.pending)
                    buffer.pending, buffer.unsynchronized = None, None if self._is_last else buffer.pending
        return values


def _message(instruction: Instruction) -> str:
    assert instruction.link is not None
    of = f" of microbatch {instruction.microbatch}" if instruction.microbatch != -1 else ""
    return format_link(instruction.link) + of


def _is_read_last(instruction: Instruction) -> bool:
    """Whether an instruction sends or receives a value that is awaited at the end of the program."""
    return instruction.link is not None and instruction.link.payload is Payload.RESULT


def _directions(programs: Sequence[Program]) -> tuple[set[Direction], bool]:
    """The directions in which programs send, and whether they send results, which are read last."""
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
        held = "; ".join(f"{digest[:8]} on {format_ranks(ranks)}" for digest, ranks in holders.items())
        raise TransportError(
            f"the ranks do not hold the same plan, programs and stage sources: {held}; start every rank with "
            "the same script, arguments, input shapes and versions"
        )
