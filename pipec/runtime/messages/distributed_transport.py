"""The transport between processes: torch.distributed, with gloo for CPU ranks and NCCL for CUDA ranks.

CPU ranks on one host exchange activations and gradients through shared memory.

The transport makes its own connections, by which no other transport of the process can be reached, whichever
ranks both have. Of a process group it uses only the members, and the store of the default one.

A rank that fails sends rank 0 the reason, which hands it to all, and then closes its connections. The other
ranks notice immediately, wherever they wait, and report which rank failed and why, or which one died or
hangs.
"""

import atexit
import functools
import hashlib
import multiprocessing.util
import pickle
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipec.errors import ExecutionError, InputError, PipecError, TransportError
from pipec.ir import Instruction, Link, Op, Payload, Program, Sizes
from pipec.ir.text_format import evaluate_dim, format_link
from pipec.runtime.messages.collective_group import CollectiveGroup, CollectiveWait
from pipec.runtime.messages.connections import Connections, Direction, Work
from pipec.runtime.messages.cpu import CpuConnections
from pipec.runtime.messages.cuda import current_device
from pipec.runtime.messages.nccl import NcclConnections
from pipec.runtime.messages.shared_memory import SharedMemory, hosts
from pipec.runtime.messages.transport import Receiver, Send
from pipec.runtime.processes.judge import describe_overdue_wait, format_ranks
from pipec.runtime.processes.launch import World, world
from pipec.runtime.processes.rendezvous import call_with_timeout, connect_ranks
from pipec.runtime.processes.star import PacketKind
from pipec.runtime.processes.stop_signals import STOP_SIGNALS

T = TypeVar("T")


_num_transports = Counter[str]()
"""The transports of this process, by the name of their group.

The number identifies the same transport on all ranks of the group, which make theirs in the same order.
"""


class DistributedTransport:
    """The transport of one rank. All ranks make transports, and call ``connect``, in the same order.

    The ranks are the processes of ``here``; None: all that were started together. The first transport makes
    the default process group for the script, if there is none, from the environment that ``torchrun`` sets. A
    wait of more than ``timeout`` seconds is an error, which rank 0 notices: the connections have no limits of
    their own. After an error the transport stays closed.
    """

    def __init__(self, device: torch.device, timeout: float = 300.0, here: World | None = None) -> None:
        here = world() if here is None else here
        self.rank, self.num_ranks = here.rank, here.size
        self.device = device
        self._timeout = timeout
        _num_transports[here.name] += 1
        self.star, store = connect_ranks(here, _num_transports[here.name], timeout)
        multiprocessing.util.Finalize(self, self.star.close, exitpriority=0)
        if device.type == "cuda":
            own = str(torch.cuda.get_device_properties(device).uuid)
            require_own_gpus(self.star.all_gather(own, "comparing GPUs"))
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
        shared = SharedMemory(self.rank)
        addresses = self.star.all_gather(shared.address, "making connections")
        self.hosts = hosts(addresses)
        """The host of each rank: the lowest rank with which it can share memory."""

        self.gloo = self.call_on_all_ranks(
            "the gloo connections", lambda: CpuConnections(shared, store, self.rank, self.num_ranks)
        )
        """Connections for CPU tensors: those of programs on CPUs, and for tensors that ranks broadcast."""

        self._connections: Connections = self.gloo
        if device.type == "cuda":
            self._connections = NcclConnections(
                device, store, self.rank, self.num_ranks, self.star.note_progress
            )
        else:
            connect = functools.partial(shared.connect, addresses)
            self.call_on_all_ranks("the connections of each host", connect)
        self.star.on_failure = _weak_call(self._close)

    def call_on_all_ranks(self, what: str, make: Callable[[], T], num_segments: int = 1) -> T:
        """The result of ``make``, which all ranks call together. Each of its segments may take the timeout.

        Raises:
            TransportError: some rank did not take part, or died.
        """
        activity = f"making {what} together with all ranks"
        try:
            with self.star.waiting(activity):
                return call_with_timeout(make, num_segments * self._timeout, self.star.check)
        except (
            TimeoutError,
            ConnectionError,
            RuntimeError,
        ) as error:  # the store or a connection is gone
            failure = self.transport_error(error, activity, None)
            self.star.fail(str(failure))
            raise failure from failure.__cause__

    def connect(self, programs: Sequence[Program], groups: Sequence[Sequence[int]], text: str) -> None:
        """Check that every rank has the same ``text``, then open the connections that ``programs`` use.

        ``groups`` are the ranks of their collectives.

        Raises:
            TransportError: the ranks hold different texts, or a connection cannot be opened.
        """
        self.require_same_text(text)
        directions, has_results = _directions(programs)

        def connect() -> None:
            with current_device(self.device):
                self._connections.open(directions, map(tuple, groups), has_results)

        self.call_on_all_ranks("the connections of the programs", connect, 2 + len(directions) + len(groups))

    def require_same_text(self, text: str) -> None:
        """Check that every rank calls this with the same text.

        Raises:
            TransportError: some ranks hold another text, or did not answer. Every rank raises it.
        """
        digest = hashlib.sha256(text.encode()).hexdigest()
        _check_equal(self.star.all_gather(digest, "comparing calls with all ranks"))

    def call_on_rank_0(self, request: str, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 alone; every rank returns its result, or raises its error.

        If the ranks do not all call this with the same ``request``, all of them raise TransportError.
        """
        self.require_same_text(request)
        with STOP_SIGNALS.uninstalled():
            if self.rank == 0:
                with self.star.interrupted_by_failures():
                    made = pickle.dumps(result_or_error(make))
                self.star.send_to_all(PacketKind.TEXT, made)
            else:
                with self.star.waiting("waiting for rank 0 to compile", 0, expected=True):
                    made = self.star.receive(0, PacketKind.TEXT)
        return result_of(made)  # type: ignore[no-any-return]

    def sender(self, instruction: Instruction, tag: int) -> Send:
        assert instruction.link is not None
        peer, values = instruction.peer, LinkValues(instruction.link)
        payload = _exchanged_as(instruction.link)
        sending = self.error_context(f"sending {_message(instruction)} to rank {peer}", peer)

        def send(tensors: Sequence[Tensor], sizes: Sizes) -> None:
            values.check(tensors, sizes)
            if sent := [as_in_memory(x) for x in tensors if x.numel()]:
                with sending as connections:
                    connections.send(sent, peer, tag, payload)

        return send

    def receiver(self, instruction: Instruction, tag: int) -> Receiver:
        activity = f"receiving {_message(instruction)} from rank {instruction.peer}"
        return _Receiver(instruction, tag, self.device, self.error_context(activity, instruction.peer))

    def group(self, ranks: Sequence[int]) -> CollectiveGroup:
        others = [rank for rank in ranks if rank != self.rank]
        meeting = self.error_context(f"meeting {format_ranks(others)} in a collective")
        return _Group(ranks.index(self.rank), tuple(ranks), meeting)

    def finish(self) -> None:
        with self.error_context("finishing the step") as connections:
            connections.drain()

    def check(self) -> None:
        with self.error_context("computing") as connections:
            connections.check()

    def fail(self, error: BaseException) -> None:
        """Send the other ranks the reason, unless one of them failed first; then close."""
        known = self.star.reason() if isinstance(error, TransportError) else None
        self.star.fail(known or (str(error) if isinstance(error, PipecError) else repr(error)))

    def _close(self) -> None:
        for connections in dict.fromkeys([self._connections, self.gloo]):
            connections.close()

    def error_context(self, activity: str, peer: int | None = None) -> "_ErrorContext":
        """A context for a use of the connections, which yields them and explains their errors.

        ``peer`` is the rank for which this one waits.
        """
        waiting = self.star.waiting(activity, peer, limited=True)
        return _ErrorContext(self, self._connections, waiting, activity, peer)

    def transport_error(self, error: Exception, activity: str, peer: int | None) -> TransportError:
        """The error to raise for an error of torch; that stays the cause only if no better one is known."""
        is_lost = not isinstance(error, TimeoutError)
        if reason := self.star.reason(_REASON_COMES_WITHIN if is_lost else 0.0):
            return self.star.error(reason, activity)
        failure = TransportError(
            f"the connection was lost while {activity}, although all processes live; see the network"
            if is_lost
            else describe_overdue_wait(activity, self._timeout, self.star.waits_for(peer))
        )
        failure.__cause__ = error
        return failure


_REASON_COMES_WITHIN = 0.5
"""Seconds. A process that dies, or fails, closes connections of several kinds one after the other."""


def _weak_call(method: Callable[[], object]) -> Callable[[], None]:
    """A call of a method that does not keep its object alive."""
    found = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := found()) is not None:
            alive()

    return call


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


def result_or_error(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The result on rank 0, or the error for all ranks to raise."""
    try:
        return make(), None
    except PipecError as error:
        return None, error
    except Exception as error:  # of a class that other ranks may not know
        return None, PipecError(f"rank 0: {type(error).__name__}: {error}")


def result_of(outcome: bytes) -> Any:
    """The result that ``result_or_error`` found on rank 0, pickled; or raises its error."""
    result, error = unpickled(outcome)
    if error is not None:
        raise error
    return result


def unpickled(data: bytes) -> Any:
    """The object, without torch's own FutureWarning when it restores a TreeSpec."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return pickle.loads(data)


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
    """One receive instruction. Each message gets new memory, except a weight, which one stage keeps."""

    def __init__(
        self, instruction: Instruction, tag: int, device: torch.device, error_context: _ErrorContext
    ) -> None:
        assert instruction.link is not None
        self._link_values, self._device = LinkValues(instruction.link), device
        self._peer, self._tag, self._error_context = instruction.peer, tag, error_context
        self._payload = _exchanged_as(instruction.link)
        self._values: list[Tensor] = []
        self._pending: Work | None = None

    def post(self, sizes: Sizes) -> None:
        if not (self._payload is Payload.WEIGHT and self._values):
            self._values = self._link_values.empty(sizes, self._device)
        if received := [value for value in self._values if value.numel()]:
            with self._error_context as connections:
                self._pending = connections.receive(received, self._peer, self._tag, self._payload)

    def wait(self) -> Sequence[Tensor]:
        if self._pending is not None:
            with self._error_context as connections:
                connections.wait(self._pending)
        self._pending, values = None, self._values
        if self._payload is not Payload.WEIGHT:
            self._values = []
        return values


class _Group:
    """A group of ranks in several processes; this process has its ``index``-th rank."""

    def __init__(self, index: int, ranks: tuple[int, ...], error_context: _ErrorContext) -> None:
        self.index, self.size = index, len(ranks)
        self._ranks, self._error_context = ranks, error_context

    def all_reduce(self, tensor: Tensor) -> CollectiveWait:
        return self._start(lambda connections: connections.all_reduce(self._ranks, tensor))

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> CollectiveWait:
        return self._start(lambda connections: connections.reduce_scatter(self._ranks, output, tensor))

    def all_gather(self, output: Tensor, tensor: Tensor) -> CollectiveWait:
        return self._start(lambda connections: connections.all_gather(self._ranks, output, tensor))

    def _start(self, start: Callable[[Connections], CollectiveWait]) -> CollectiveWait:
        with self._error_context as connections:
            wait = start(connections)

        def explained() -> None:
            with self._error_context:
                wait()

        return explained


class LinkValues:
    """The values of a link, with shapes that follow from the sizes of a microbatch."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._dtypes = [getattr(torch, value.dtype) for value in link.values]
        self._shapes: tuple[Sizes, list[tuple[int, ...]]] = {}, []

    def shapes(self, sizes: Sizes) -> list[tuple[int, ...]]:
        """The shapes for ``sizes``; evaluated once while these stay the same."""
        if self._shapes[0] != sizes or not self._shapes[1]:
            shapes = [tuple(evaluate_dim(dim, sizes) for dim in value.shape) for value in self._link.values]
            self._shapes = dict(sizes), shapes
        return self._shapes[1]

    def empty(self, sizes: Sizes, device: torch.device) -> list[Tensor]:
        """Memory for the values on a device."""
        return [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in zip(self.shapes(sizes), self._dtypes, strict=True)
        ]

    def check(self, tensors: Sequence[Tensor], sizes: Sizes) -> None:
        """Check that tensors have the dtypes and shapes that the receiver expects.

        Raises:
            ExecutionError: a tensor differs.
        """
        for number, (tensor, dtype, shape) in enumerate(
            zip(tensors, self._dtypes, self.shapes(sizes), strict=True)
        ):
            if tensor.dtype is not dtype or tensor.shape != shape:
                raise ExecutionError(
                    f"{format_link(self._link)}: {self._link.values[number].name} is a tensor of "
                    f"{tensor.dtype} with shape {tuple(tensor.shape)}, but the plan has {dtype} "
                    f"with shape {shape}: an operator returns another result than when the model was "
                    "captured; check the fake implementations of custom operators"
                )


def as_in_memory(tensor: Tensor) -> Tensor:
    """The tensor with its elements in order, without a lazy conjugation or negation: what is sent."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _message(instruction: Instruction) -> str:
    assert instruction.link is not None
    of = f" of microbatch {instruction.microbatch}" if instruction.microbatch != -1 else ""
    return format_link(instruction.link) + of


def _exchanged_as(link: Link) -> Payload:
    """The payload of a message. All ranks exchange a ``RESULT`` together; others pass between two ranks."""
    is_between_two = link.payload is Payload.RESULT and not link.is_broadcast
    return Payload.MICROBATCH_RESULT if is_between_two else link.payload


def _directions(programs: Sequence[Program]) -> tuple[set[Direction], bool]:
    """The directions in which programs send, and whether they send results that all ranks exchange."""
    sends = {
        (program.rank, each.peer, each.link is not None and _exchanged_as(each.link) is Payload.RESULT)
        for program in programs
        for each in program.instructions
        if each.op is Op.SEND
    }
    return {(rank, peer) for rank, peer, is_result in sends if not is_result}, any(x for *_, x in sends)


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
