"""The transport between processes, over torch.distributed: gloo for CPU ranks, NCCL for CUDA ranks.

The transport makes connections of its own. From the default process group it takes the members and the
store alone, so that closing the connections leaves that group open.

A rank that fails writes its reason into the store and then closes its connections. The others notice the
closed connections at once, wherever they wait, and read the reason in the store. A process that dies closes
its connections too, but leaves no reason.
"""

import contextlib
import functools
import hashlib
import itertools
import math
import pickle
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

# The store that the ranks of the process group share; the public API does not hand it out.
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from pipec.errors import PipecError, TransportError
from pipec.ir import Instruction, Link, Op, Program, Value
from pipec.ir.text import evaluate_dim, format_link
from pipec.runtime.connections import Connections, Direction, GlooConnections
from pipec.runtime.group import Group
from pipec.runtime.nccl import NcclConnections
from pipec.runtime.processes_group import ProcessesGroup
from pipec.runtime.storage import is_exclusive
from pipec.runtime.transport import Receiver, Send

T = TypeVar("T")

_transport_numbers = itertools.count()
"""Numbers the transports of a process, so that each writes to its own part of the store.

The number means the same transport on every rank, because all ranks make theirs in the same order.
"""


class TorchDistributed:
    """The transport of this process's rank. All ranks make theirs, and call ``connect``, in the same order.

    It uses the default process group; if there is none, it makes one from the environment that ``torchrun``
    sets. A wait of more than ``timeout`` seconds is an error. After an error the transport stays closed,
    while the process group stays usable.
    """

    def __init__(self, device: torch.device, timeout: float = 300.0) -> None:
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._timeout = timeout
        self._store = PrefixStore(f"pipec/{next(_transport_numbers)}", _get_default_store())
        self._gatherings, self._made = itertools.count(), itertools.count()
        self._buffers: dict[tuple[Link, int, int], list[_Buffer]] = {}
        self._connections: Connections = (
            NcclConnections(device, self.rank, timeout, self._has_failed)
            if device.type == "cuda"
            else GlooConnections(self.rank, self.num_ranks, timeout)
        )

    def connect(self, programs: Sequence[Program], groups: Sequence[Sequence[int]], text: str) -> None:
        """Check that every rank holds the same ``text``, then open the connections that ``programs`` use.

        ``groups`` are the ranks of their collectives.

        Raises:
            TransportError: the ranks hold different texts, or a connection cannot be opened.
        """
        self.agree(text)
        try:
            with self.explaining("opening the connections to other ranks") as connections:
                connections.open(_directions(programs))
                connections.gather(tuple(ranks) for ranks in groups)
        except TransportError as error:
            self.fail(error)
            raise

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
        prefix = f"gathering/{next(self._gatherings)}"
        keys = [f"{prefix}/{rank}" for rank in range(self.num_ranks)]
        self._store.set(keys[self.rank], text)
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout))
        except RuntimeError as error:
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise TransportError(
                f"rank {self.rank} waited {self._timeout:g} s for {_ranks(absent)}; "
                "every rank must run the same script with the same arguments"
            ) from error
        return [self._store.get(key).decode() for key in keys]

    def once(self, request: str, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 alone; every rank returns its result, or raises its error.

        If the ranks do not all call this with the same ``request``, all of them raise TransportError.
        """
        self.agree(request)
        key = f"made/{next(self._made)}"
        if self.rank == 0:
            self._store.set(key, pickle.dumps(_outcome(make)))  # type: ignore[arg-type]
        self._store.wait([key], _LONGEST_MAKE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, when it restores a TreeSpec
            result, error = pickle.loads(self._store.get(key))
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def sender(self, instruction: Instruction, tag: int) -> Send:
        doing = f"sending {_message(instruction)} to rank {instruction.peer}"

        def send(tensors: Sequence[Tensor]) -> None:
            with self.explaining(doing) as connections:
                connections.send([_plain(tensor) for tensor in tensors], instruction.peer, tag)

        return send

    def receiver(self, instruction: Instruction, tag: int) -> Receiver:
        assert instruction.link is not None
        key = instruction.link, instruction.peer, instruction.slot
        if key not in self._buffers:
            self._buffers[key] = [_Buffer(value, self.device) for value in instruction.link.values]
        return _Receiver(self, instruction, tag, self._buffers[key])

    def group(self, ranks: Sequence[int]) -> Group:
        members, others = tuple(ranks), [rank for rank in ranks if rank != self.rank]
        doing = f"meeting {_ranks(others)} in a collective"
        explaining = functools.partial(self.explaining, doing)
        return ProcessesGroup(members.index(self.rank), members, explaining)

    def finish(self) -> None:
        with self.explaining("finishing the step") as connections:
            connections.drain()

    def check(self) -> None:
        with self.explaining("computing") as connections:
            connections.check()

    def fail(self, error: BaseException) -> None:
        """Write the reason into the store, unless another rank failed before; then close."""
        text = str(error) if isinstance(error, PipecError) else f"rank {self.rank}: {error!r}"
        with contextlib.suppress(RuntimeError):  # the process that holds the store may be gone
            self._store.compare_set(_FAILURE, "", text)
        self._connections.close()

    @contextlib.contextmanager
    def explaining(self, doing: str) -> Iterator[Connections]:
        """Give the connections, and turn their errors into a TransportError that tells what was going on."""
        try:
            yield self._connections
        except (TimeoutError, ConnectionError) as error:
            raise TransportError(self._explain(error, doing)) from error

    def _explain(self, error: Exception, doing: str) -> str:
        if failure := self._failure(isinstance(error, ConnectionError)):
            return f"another rank failed while this one was {doing}:\n{textwrap.indent(failure, '  ')}"
        if isinstance(error, TimeoutError):
            return f"{doing} took more than {self._timeout:g} s; that rank hangs, or waits for one that does"
        return (
            f"the connection was lost while {doing}; that process ended or died, its own output may say why"
        )

    def _failure(self, is_coming: bool) -> str | None:
        """The reason of the rank that failed first, if there is one, or if it comes within a moment.

        It comes after the end of the connections if a message of that rank took too long, because gloo then
        closes them. A process that died leaves no reason.
        """
        with contextlib.suppress(RuntimeError):
            if is_coming:
                self._store.wait([_FAILURE], _REASON_COMES_WITHIN)
            if self._store.check([_FAILURE]):
                return self._store.get(_FAILURE).decode()
        return None

    def _has_failed(self) -> bool:
        """Whether another rank has failed. The process that holds the store has, if the store is gone."""
        try:
            return self._store.check([_FAILURE])
        except RuntimeError:
            return True


_FAILURE = "failure"

_REASON_COMES_WITHIN = timedelta(seconds=0.2)

_LONGEST_MAKE = timedelta(hours=6)
"""How long ranks wait for what rank 0 makes. If rank 0 dies, its store dies too and ends the wait."""


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
        self, transport: TorchDistributed, instruction: Instruction, tag: int, buffers: Sequence["_Buffer"]
    ) -> None:
        self._transport = transport
        self._peer = instruction.peer
        self._tag = tag
        self._buffers = buffers
        self._doing = f"receiving {_message(instruction)} from rank {instruction.peer}"
        self._posted: list[tuple[Tensor, dist.Work]] = []

    def post(self, size: int) -> None:
        tensors = [buffer.view(size) for buffer in self._buffers]
        with self._transport.explaining(self._doing) as connections:
            self._posted = [
                (tensor, connections.receive(tensor, self._peer, self._tag)) for tensor in tensors
            ]

    def wait(self) -> Sequence[Tensor]:
        posted, self._posted = self._posted, []
        with self._transport.explaining(self._doing) as connections:
            for _, work in posted:
                connections.wait(work)
        return [tensor for tensor, _ in posted]


class _Buffer:
    """Memory for one received value. It is used again as soon as nobody holds the value it had before."""

    def __init__(self, value: Value, device: torch.device) -> None:
        self._value = value
        self._device = device
        self._memory = torch.empty(0)

    def view(self, size: int) -> Tensor:
        """A tensor of the value's shape for ``size`` samples, with undefined contents."""
        shape = [evaluate_dim(dim, size) for dim in self._value.shape]
        count = math.prod(shape)
        if self._memory.numel() < count or not is_exclusive(self._memory):
            dtype = getattr(torch, self._value.dtype)
            self._memory = torch.empty(count, dtype=dtype, device=self._device)
        return self._memory[:count].view(shape)


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
        held = "; ".join(f"{digest[:8]} on {_ranks(ranks)}" for digest, ranks in holders.items())
        raise TransportError(
            f"the ranks do not hold the same plan, programs and stage sources: {held}; start every rank with "
            "the same script, arguments, input shapes and versions"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
