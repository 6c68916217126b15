"""The transport between processes, over torch.distributed: gloo for CPU ranks, NCCL for CUDA ranks.

The transport makes connections of its own. From the default process group it takes the members and the
store alone, so that closing the connections leaves that group open.

A rank that fails tells the others why, over their lifelines, and then closes its connections. The others
notice the closed connections at once, wherever they wait, and say what the lifelines know: which rank failed
and why, or which one died or is stopped.
"""

import contextlib
import functools
import hashlib
import itertools
import multiprocessing.util
import pickle
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipec.errors import PipecError, TransportError
from pipec.ir import Instruction, Link, Op, Program, Sizes
from pipec.ir.text import format_link
from pipec.runtime.connections import Connections, Direction, GlooConnections
from pipec.runtime.group import Group
from pipec.runtime.hosts_group import HostsGroup
from pipec.runtime.launch import current_device, world
from pipec.runtime.lifelines import names
from pipec.runtime.nccl import NcclConnections
from pipec.runtime.processes_group import ProcessesGroup
from pipec.runtime.rendezvous import bounded, meet
from pipec.runtime.storage import Buffer, buffers_for
from pipec.runtime.transport import Receiver, Send

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
            NcclConnections(device, self.rank, timeout, self._lifelines.has_failed)
            if device.type == "cuda"
            else self.gloo_connections()
        )
        self._lifelines.on_failure = self._connections.close

    def gloo_connections(self) -> GlooConnections:
        """Connections of CPU tensors. All ranks make theirs in the same order."""
        make = functools.partial(GlooConnections, self.rank, self.num_ranks, self._timeout)
        return self.making("the gloo connections", make)

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
            failure = self._explained(error, doing, None)
            self._lifelines.fail(str(failure))
            raise failure from failure.__cause__

    def connect(self, programs: Sequence[Program], groups: Sequence[Sequence[int]], text: str) -> None:
        """Check that every rank holds the same ``text``, then open the connections that ``programs`` use.

        ``groups`` are the ranks of their collectives.

        Raises:
            TransportError: the ranks hold different texts, or a connection cannot be opened.
        """
        self.agree(text)
        directions = _directions(programs)

        def connect() -> None:
            with current_device(self.device):
                self._connections.open(directions)
                self._connections.gather(tuple(ranks) for ranks in groups)

        self.making("the connections of the programs", connect, 1 + len(directions) + len(groups))

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

    def once(self, request: str, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 alone; every rank returns its result, or raises its error.

        If the ranks do not all call this with the same ``request``, all of them raise TransportError.
        """
        self.agree(request)
        if self.rank == 0:
            with self._lifelines.interrupted_by_failures():
                made = pickle.dumps(_outcome(make))
            self._lifelines.tell(made)
        else:
            made = self._lifelines.heard(0, "waiting for rank 0 to compile")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, when it restores a TreeSpec
            result, error = pickle.loads(made)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def sender(self, instruction: Instruction, tag: int) -> Send:
        doing = f"sending {_message(instruction)} to rank {instruction.peer}"

        def send(tensors: Sequence[Tensor]) -> None:
            with self.explaining(doing, instruction.peer) as connections:
                plain = [_plain(tensor) for tensor in tensors if tensor.numel()]
                connections.send(plain, instruction.peer, tag)

        return send

    def receiver(self, instruction: Instruction, tag: int) -> Receiver:
        assert instruction.link is not None
        key = instruction.link, instruction.peer, instruction.slot
        if key not in self._buffers:
            self._buffers[key] = buffers_for(instruction, self.device)
        return _Receiver(self, instruction, tag, self._buffers[key])

    def held(self) -> Sequence[Tensor]:
        return [buffer.memory for buffers in self._buffers.values() for buffer in buffers]

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
        self._connections.close()

    @contextlib.contextmanager
    def explaining(self, doing: str, peer: int | None = None) -> Iterator[Connections]:
        """Give the connections, and turn their errors into a TransportError that tells what was going on.

        ``peer`` is the rank that must do something for this to end.
        """
        try:
            with self._lifelines.waiting(doing, peer):
                yield self._connections
        except (TimeoutError, ConnectionError) as error:
            failure = self._explained(error, doing, peer)
            raise failure from failure.__cause__

    def _explained(self, error: Exception, doing: str, peer: int | None) -> TransportError:
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


def _outcome(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except PipecError as error:
        return None, error
    except Exception as error:  # of a class that other ranks may not know
        return None, PipecError(f"rank 0: {type(error).__name__}: {error}")


class _Receiver:
    """One receive instruction. All receives into the same slot share its buffers."""

    def __init__(
        self, transport: TorchDistributed, instruction: Instruction, tag: int, buffers: Sequence[Buffer]
    ) -> None:
        self._transport = transport
        self._peer = instruction.peer
        self._tag = tag
        self._buffers = buffers
        self._doing = f"receiving {_message(instruction)} from rank {instruction.peer}"
        self._posted: list[tuple[Tensor, dist.Work | None]] = []

    def post(self, sizes: Sizes) -> None:
        tensors = [buffer.view(sizes) for buffer in self._buffers]
        with self._transport.explaining(self._doing) as connections:
            self._posted = [
                (tensor, connections.receive(tensor, self._peer, self._tag) if tensor.numel() else None)
                for tensor in tensors
            ]

    def wait(self) -> Sequence[Tensor]:
        posted, self._posted = self._posted, []
        with self._transport.explaining(self._doing, self._peer) as connections:
            for _, work in posted:
                if work is not None:
                    connections.wait(work)
        return [tensor for tensor, _ in posted]


def _plain(tensor: Tensor) -> Tensor:
    """The tensor with its values in memory, one after the other.

    A tensor that torch marked as the conjugate, or the negative, of its memory is written out.
    """
    return tensor.resolve_conj().resolve_neg().contiguous()


def _message(instruction: Instruction) -> str:
    assert instruction.link is not None
    of = f" of microbatch {instruction.microbatch}" if instruction.microbatch != -1 else ""
    return format_link(instruction.link) + of


def _directions(programs: Sequence[Program]) -> set[Direction]:
    """Between which ranks the programs send."""
    return {
        (program.rank, instruction.peer)
        for program in programs
        for instruction in program.instructions
        if instruction.op is Op.SEND
    }


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
