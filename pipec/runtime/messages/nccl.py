"""Point-to-point connections between the ranks of a process group over NCCL, for CUDA tensors."""

import atexit
import contextlib
import functools
import itertools
import logging
import math
import os
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from pipec.errors import InputError
from pipec.ir import Payload
from pipec.runtime.messages.collective_group import CollectiveWait
from pipec.runtime.messages.connections import (
    MAX_IN_TRANSIT,
    NO_LIMIT,
    Direction,
    Group,
    Work,
    Works,
)
from pipec.runtime.messages.cuda import PastLaunches

log = logging.getLogger("pipec")

_Message = tuple[Sequence[dist.Work], Sequence[Tensor]]
"""Works that were started together, with the memory that they use."""

_Messages = deque[_Message]
"""The messages of one direction that are in transit, oldest first."""


class NcclConnections:
    """A group of two ranks for every direction, and one of all ranks for results.

    Groups find each other by ``store``, which is of this pipeline alone. No other process takes part.

    NCCL has no tags and matches the messages of a group in order. Each direction has its own group, so that
    its messages wait only for each other, and both ranks have them in the same order. Results go from some
    ranks to all: they are exchanged at once, so that their order does not matter.

    torch runs each group on a stream of a pool, and groups that share a stream would wait for each other.
    These groups use the pool of high priority, which a script's own streams do not use; kernels that wait for
    a message are launched as soon as it arrives.

    A receive that is launched occupies the GPU until its message comes. If what is launched next waits for
    the whole GPU, as ``cudaFree`` and the loading of a kernel do, it would wait for that message, and two
    neighbours for each other. A posted receive is therefore launched by the next send, collective or wait for
    a posted receive: behind the launch of the compute that follows it in the program. It is launched from a
    stream of its own, and does not wait for this compute, but only for what was launched before it was
    posted, which may read the memory that it fills.

    At most ``MAX_IN_TRANSIT`` sent messages of a direction are in transit, and the host waits for all but the
    last few values that it received. This bounds how far the host is ahead of the GPU, and the memory of
    messages.

    Messages are waited for on the GPU's stream, even those that never arrive; the host may then hang in any
    call that waits for the GPU. If another rank fails, another thread therefore calls ``close``, which aborts
    all messages and unblocks the host. All later calls raise ConnectionError. torch's own watchdog would end
    the process instead, while the script saves; it is off for these groups.

    Groups that are left when the script ends are aborted, of which torch would warn otherwise.
    """

    def __init__(
        self,
        device: torch.device,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        on_progress: Callable[[], None],
    ) -> None:
        self._device = device
        self._store = store
        self._rank = rank
        self._everyone = tuple(range(num_ranks))
        self._on_progress = on_progress
        self._groups: dict[tuple[int, ...], Group | None] = {}
        self._pending: dict[tuple[int, ...], _Messages] = defaultdict(deque)
        self._posted: deque[tuple[_Receive, Callable[[], Sequence[dist.Work]]]] = deque()
        self._awaited: deque[_Receive] = deque()
        self._launches = PastLaunches(device)
        self._last_sent: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._last_received: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._aborting = threading.Lock()
        self._aborted = False
        self._unaborted: list[Group] = []
        atexit.register(_abort_each, self._unaborted)
        _ignore_warnings()
        _warn_of_few_connections()

    def open(
        self,
        directions: Iterable[Direction],
        groups: Iterable[tuple[int, ...]] = (),
        has_results: bool = False,
    ) -> None:
        """Make the groups, and use each of them once, because the first use of a group blocks.

        All ranks use groups in the same order, so that none blocks on a group that its peer uses later. First
        messages are sent in the order of an edge coloring, so that disjoint pairs of ranks do not wait for
        each other.
        """
        pairs = edge_coloring_order(sorted({*directions} - self._groups.keys()))
        collectives = {(*ranks, -1) for ranks in ({*groups} | ({self._everyone} if has_results else set()))}
        new = [*sorted(pairs), *sorted(collectives - self._groups.keys())]
        self._check_streams(new)
        for ranks in new:
            self._make_group(ranks)
        for ranks in [*pairs, *new[len(pairs) :]]:
            if self._rank in ranks:
                self._use_once(ranks)

    def all_reduce(self, ranks: tuple[int, ...], tensor: Tensor) -> CollectiveWait:
        return self._collective(ranks, lambda group: group.allreduce([tensor]))

    def reduce_scatter(self, ranks: tuple[int, ...], output: Tensor, tensor: Tensor) -> CollectiveWait:
        parts = [*tensor.view(len(ranks), -1)]
        return self._collective(ranks, lambda group: group.reduce_scatter([output], [parts]))

    def all_gather(self, ranks: tuple[int, ...], output: Tensor, tensor: Tensor) -> CollectiveWait:
        parts = [*output.view(len(ranks), -1)]
        return self._collective(ranks, lambda group: group.allgather([parts], [tensor]))

    def _collective(self, ranks: tuple[int, ...], start: Callable[[Group], dist.Work]) -> CollectiveWait:
        key = (*ranks, -1)
        self._launch_receives()
        with self._nccl_errors():
            work = start(self._group(key))
            self._remember(key, [work], [])
        return functools.partial(self.wait, work)

    def send(
        self, tensors: Sequence[Tensor], peer: int, tag: int, payload: Payload = Payload.ACTIVATION
    ) -> None:
        if payload is Payload.RESULT:
            self._last_sent[peer] += tensors
            return
        direction = self._rank, peer
        self._launch_receives()
        self._wait_until(lambda: self._in_transit(direction) < MAX_IN_TRANSIT)
        with self._nccl_errors():
            group = self._group(direction)
            works = [group.send([nccl_compatible(tensor)], 1, 0) for tensor in tensors]
            self._remember(direction, works, tensors)

    def receive(
        self, tensors: Sequence[Tensor], peer: int, tag: int, payload: Payload = Payload.ACTIVATION
    ) -> Work:
        """Post a receive, which is launched later."""
        if payload is Payload.RESULT:
            self._last_received[peer] += tensors
            return _Results(self._start_last)
        self.check()
        receive, where_posted = _Receive(), self._launches.here()
        self._posted.append((receive, functools.partial(self._receive, tensors, peer, where_posted)))
        return receive

    def _receive(
        self, tensors: Sequence[Tensor], peer: int, where_posted: contextlib.AbstractContextManager[None]
    ) -> Sequence[dist.Work]:
        direction = peer, self._rank
        with self._nccl_errors(), where_posted:
            group = self._group(direction)
            works = [group.recv([nccl_compatible(tensor)], 0, 0) for tensor in tensors]
            self._remember(direction, works, tensors)
        return works

    def _launch_receives(self) -> None:
        """Launch the posted receives, in order."""
        while self._posted:
            receive, launch = self._posted.popleft()
            receive.works = launch()

    def wait(self, work: Work) -> None:
        if isinstance(work, _Receive) and not work.works:
            self._launch_receives()
        with self._nccl_errors():
            work.wait()
        if isinstance(work, _Receive):
            self._awaited.append(work)
            while sum(len(each.works) for each in self._awaited) > _MAX_AWAITED:
                self._wait_until(self._awaited.popleft().is_completed)

    def drain(self) -> None:
        """Wait until every message is complete.

        The results of a step may not be used before: an aborted message leaves no trace in the memory that it
        should have filled.
        """
        self._launch_receives()
        self._start_last()
        self._wait_until(lambda: not self._reap_all())
        self._awaited.clear()

    def check(self) -> None:
        if self._aborted:
            raise ConnectionError("the messages were aborted")

    def close(self) -> None:
        """Abort the kernels that wait for a peer. Peers abort theirs when they see that this rank failed."""
        self._abort()
        self._pending.clear()

    def _abort(self) -> None:
        """Abort all messages, from any thread.

        Sets ``_aborted`` first, because an aborted message counts as complete, without an error.
        """
        with self._aborting:
            self._aborted = True
            _abort_together(self._unaborted)

    def _make_group(self, ranks: tuple[int, ...]) -> None:
        """Make a group on its ranks, of which the k-th is its rank k; a last -1 marks one for collectives."""
        self._groups[ranks] = None
        if self._rank not in ranks:
            return
        members = [rank for rank in ranks if rank >= 0]
        options = _options(is_direction=len(members) == len(ranks))
        store = dist.PrefixStore(f"nccl/{ranks}", self._store)
        with self._nccl_errors(), _without_watchdog():
            group = dist.ProcessGroupNCCL(store, members.index(self._rank), len(members), options)
            group.set_timeout(NO_LIMIT)
        self._groups[ranks] = cast(Group, group)
        self._unaborted.append(cast(Group, group))

    def _group(self, ranks: tuple[int, ...]) -> Group:
        group = self._groups[ranks]
        assert group is not None, "this rank is not a member of the group"
        return group

    def _use_once(self, ranks: tuple[int, ...]) -> None:
        number = torch.zeros(1, device=self._device)
        if ranks[-1] == -1:
            self.all_reduce(ranks[:-1], number)
        elif self._rank == ranks[0]:
            self.send([number], ranks[1], 0)
        else:
            self.receive([number], ranks[0], 0)
        self.drain()

    def _check_streams(self, new: Collection[tuple[int, ...]]) -> None:
        """Refuse groups if two would share a stream on some rank. Every rank raises the same error."""
        groups = self._groups.keys() | {*new}
        for rank in self._everyone:
            count = sum(rank in ranks for ranks in groups)
            if count > _STREAMS_OF_POOL:
                raise InputError(
                    f"rank {rank} would exchange messages over {count} NCCL groups, but torch has "
                    f"{_STREAMS_OF_POOL} streams for them on a GPU, and groups that share a stream could "
                    "deadlock; use fewer stages, or let values cross fewer of them"
                )

    def _start_last(self) -> None:
        """Exchange the results of all ranks, unless that was done, as the bytes for each peer.

        Every rank sends results or receives some, posts all of a step before it waits for one, and so takes
        part once in a step. Peers may get different results: with replicas that pass their own rows, those of
        another pipeline get none.
        """
        if not self._last_sent and not self._last_received:
            return
        sent, received = {**self._last_sent}, {**self._last_received}
        self._last_sent.clear()
        self._last_received.clear()
        make = functools.partial(torch.empty, dtype=torch.uint8, device=self._device)
        outgoing = [
            torch.cat([make(0), *(tensor.view(-1).view(torch.uint8) for tensor in sent.get(rank, ()))])
            for rank in self._everyone
        ]
        incoming = [make(sum(tensor.nbytes for tensor in received.get(rank, ()))) for rank in self._everyone]
        wait = self._collective(self._everyone, lambda group: group.alltoall(incoming, outgoing))
        wait()
        for peer, tensors in received.items():
            for tensor, part in zip(tensors, incoming[peer].split([x.nbytes for x in tensors]), strict=True):
                tensor.view(-1).view(torch.uint8).copy_(part)

    def _remember(
        self, direction: tuple[int, ...], works: Sequence[dist.Work], tensors: Sequence[Tensor]
    ) -> None:
        messages = self._pending[direction]
        _reap(messages)
        messages.append((works, tensors))

    def _in_transit(self, direction: tuple[int, ...]) -> int:
        """The number of incomplete messages of a direction."""
        with self._nccl_errors():
            _reap(self._pending[direction])
        return len(self._pending[direction])

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait on the host. Each message that completes is progress.

        Another rank may wait on its host until a receive is launched here, so all of them are.
        """
        fewest = math.inf
        while not is_done():
            self._launch_receives()
            if (left := self._reap_all()) < fewest:
                fewest = left
                self._on_progress()
            time.sleep(_POLL_SECONDS)
        self.check()

    def _reap_all(self) -> int:
        """Drop complete messages. Returns the number of incomplete ones."""
        with self._nccl_errors():
            for messages in list(self._pending.values()):
                _reap(messages)
        return sum(map(len, list(self._pending.values())))

    @contextlib.contextmanager
    def _nccl_errors(self) -> Iterator[None]:
        """Turn torch's errors of connections into ConnectionError."""
        self.check()
        try:
            yield
        except dist.DistError as error:
            raise ConnectionError(str(error)) from None


_POLL_SECONDS = 50e-6
_MAX_AWAITED = 8
"""The most received values that the GPU waits for, or computes with, while the host goes on."""

_STREAMS_OF_POOL = 32
"""torch's streams of each priority on a device, assigned round robin (CUDAStream.h)."""

MAX_CTAS = 4
"""The thread blocks that a message between two ranks occupies, also while it waits for the other rank."""


def _options(is_direction: bool) -> "dist.ProcessGroupNCCL.Options":
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if is_direction:
        options.config.max_ctas = MAX_CTAS
    return options


_SUCCESS = 0
"""The result of a message, as a number of torch's ``WorkResult``."""

_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Groups that are made inside a ``with`` report failed messages, and do not end the process.

    The constructor of a group reads the environment, which then is again as it was.
    """
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before


def _ignore_warnings() -> None:
    """Hide what torch warns of at each start, which is meant: unbatched messages."""
    warnings.filterwarnings("ignore", "An unbatched P2P op", UserWarning)


@functools.cache
def _warn_of_few_connections() -> None:
    """Warn, once, of an environment in which groups share a queue of the GPU: one would wait for another."""
    given = os.environ.get(_CONNECTIONS, "")
    if given.isdecimal() and int(given) < _DEFAULT_CONNECTIONS:
        log.warning(
            "%s=%s lets messages between ranks wait for each other, which can deadlock; unset it, or set it "
            "to %d or more before CUDA starts",
            _CONNECTIONS,
            given,
            _DEFAULT_CONNECTIONS,
        )


_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_DEFAULT_CONNECTIONS = 8


def edge_coloring_order(directions: Sequence[Direction]) -> list[Direction]:
    """The directions by the colors of a greedy edge coloring: those of one color have no rank in common.

    A chain of any length takes four colors::

        0>1  1>0  1>2  2>1  2>3  3>2    ->    0>1  2>3    1>0  3>2    1>2    2>1
    """
    colors: dict[Direction, int] = {}
    for direction in directions:
        taken = {colors[other] for other in colors if {*direction} & {*other}}
        colors[direction] = next(number for number in itertools.count() if number not in taken)
    return sorted(directions, key=lambda direction: (colors[direction], direction))


class _Receive:
    """A posted receive, without works until it is launched."""

    def __init__(self) -> None:
        self.works: Sequence[dist.Work] = ()

    def wait(self) -> None:
        Works(self.works).wait()

    def is_completed(self) -> bool:
        return len(self.works) > 0 and all(work.is_completed() for work in self.works)


class _Results:
    """The messages of results, which are exchanged when the first of them is waited for."""

    def __init__(self, exchange: Callable[[], None]) -> None:
        self.wait = exchange


def _reap(messages: _Messages) -> None:
    """Drop complete messages, oldest first. Raises ConnectionError for a failed message.

    A failed message counts as complete. ``is_completed`` then sets its result (2.11 to 2.13), which for a
    message that succeeded torch may set later. ``exception`` cannot be called before torch 2.13. ``wait``
    would raise too, but it first aborts the message's communicator alone; see ``_abort_together``.
    """
    while messages and all(work.is_completed() for work in messages[0][0]):
        works, _ = messages.popleft()
        for work in works:
            result = work.get_future_result()  # type: ignore[attr-defined]
            if result.done() and result.value() != _SUCCESS:
                raise ConnectionError("an NCCL message failed; torch has logged why")


def _abort_together(groups: list[Group]) -> None:
    """Abort the groups concurrently, and empty the list.

    An abort may wait for everything that runs on the GPU, including messages of other groups, which end only
    when their own aborts begin. An NCCL group call around the aborts, as in torch's ``_abort_process_group``,
    does not help: it covers the calls of one thread, and torch aborts each process group on its own thread
    (2.11 to 2.13).
    """
    threads = [threading.Thread(target=_abort_one, args=(group,), name="pipec abort") for group in groups]
    groups.clear()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort_each(groups: list[Group]) -> None:
    """Abort the groups one after the other: when a script ends, Python starts no threads any more (3.12)."""
    while groups:
        _abort_one(groups.pop())


def _abort_one(group: Group) -> None:
    with contextlib.suppress(RuntimeError):  # after the group's timeout
        group.abort()


_NCCL_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)


def nccl_compatible(tensor: Tensor) -> Tensor:
    """A contiguous tensor for NCCL; viewed as bytes if NCCL lacks its dtype."""
    return tensor if tensor.dtype in _NCCL_DTYPES else tensor.view(-1).view(torch.uint8)
