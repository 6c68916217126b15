"""Point-to-point connections between the ranks of a process group over NCCL, for CUDA tensors."""

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipec.runtime.connections import Collective, Direction, started
from pipec.runtime.watcher import Watcher

_Messages = deque[tuple[dist.Work, Tensor]]
"""The messages of one direction that are under way, oldest first, each with the memory that it uses."""


class NcclConnections:
    """A group of two ranks for every direction.

    NCCL has no tags and matches the messages of a group in order. With a group of its own, a direction's
    messages wait for each other alone, and both ranks have them in the same order.

    A wait for a message happens on the GPU's stream, and so does the wait for a message that never comes. The
    host may then be stuck in any call that waits for the GPU. A thread therefore asks ``is_failed`` all the
    time whether another rank has failed; if so, it aborts all messages, which sets the host free. Whatever is
    called afterwards raises ConnectionError.
    """

    def __init__(
        self, device: torch.device, rank: int, timeout: float, is_failed: Callable[[], bool]
    ) -> None:
        self._device = device
        self._rank = rank
        self._timeout = timeout
        self._is_failed = is_failed
        self._opened: set[tuple[int, ...]] = set()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._pending: dict[tuple[int, ...], _Messages] = defaultdict(deque)
        self._aborting = threading.Lock()
        self._aborted = False
        self._watcher = Watcher(self, NcclConnections.abort_if_failed, _CHECK_SECONDS)

    def open(self, directions: Iterable[Direction]) -> None:
        """Make the groups, and send a first message over each: the first use of a group blocks.

        All ranks do so in the same order, so that none blocks on a group that the other comes to later. Every
        rank takes part in making every group. torch gives a number instead of a group to those outside it.
        """
        for direction in sorted(set(directions) - self._opened):
            if self._make_group(direction):
                self._greet(*direction)

    def gather(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Make the groups, and sum a number over each. Groups of two ranks are not those of a direction."""
        for ranks in sorted({(*ranks, -1) for ranks in groups} - self._opened):
            if self._make_group(ranks):
                self._sum_once(ranks[:-1])

    def collective(self, ranks: tuple[int, ...], start: Collective) -> dist.Work:
        key = (*ranks, -1)
        with self._nccl_errors():
            work = started(start(self._groups[key]))
            self._remember(key, work, torch.empty(0))
        return work

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        direction = self._rank, peer
        with self._nccl_errors():
            for tensor in tensors:
                work = dist.isend(transferable(tensor), peer, group=self._groups[direction])
                self._remember(direction, started(work), tensor)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        direction = peer, self._rank
        with self._nccl_errors():
            work = started(dist.irecv(transferable(tensor), peer, group=self._groups[direction]))
            self._remember(direction, work, tensor)
        return work

    def wait(self, work: dist.Work) -> None:
        with self._nccl_errors():
            work.wait()

    def drain(self) -> None:
        """Wait until every message is over. It takes too long when none ends for the time of the timeout."""
        fewest, deadline = self._reap_all(), time.monotonic() + self._timeout
        while left := self._reap_all():
            now = time.monotonic()
            if left < fewest:
                fewest, deadline = left, now + self._timeout
            elif now > deadline:
                raise TimeoutError(
                    f"{left} NCCL messages are still under way after {self._timeout} s in which none ended"
                )
            time.sleep(_POLL_SECONDS)
        self.check()

    def check(self) -> None:
        if self._aborted:
            raise ConnectionError("the messages were aborted")

    def close(self) -> None:
        """Abort the kernels that wait for a peer. Peers abort theirs when they see that this rank failed."""
        self._watcher.stop()
        self._abort()
        self._pending.clear()

    def abort_if_failed(self) -> bool:
        """What the watcher does; returns whether there is nothing left to watch."""
        if self._is_failed():
            self._abort()
        return self._aborted

    def _abort(self) -> None:
        """Abort all messages, from whatever thread.

        First it says so: an aborted message counts as one that is over, without an error.
        """
        with self._aborting:
            first, self._aborted = not self._aborted, True
            if first:
                _abort_together(list(self._groups.values()))

    def _make_group(self, ranks: tuple[int, ...]) -> bool:
        """Make a group of ranks; a last -1 marks one for collectives. Returns whether this rank is in it."""
        with self._nccl_errors():
            # NCCL's own watchdog ends the process, so it must be slower than `drain`.
            members = [rank for rank in ranks if rank >= 0]
            group = dist.new_group(members, timedelta(seconds=2 * self._timeout), "nccl")
        self._opened.add(ranks)
        if self._rank in ranks:
            self._groups[ranks] = group
        return self._rank in ranks

    def _sum_once(self, ranks: tuple[int, ...]) -> None:
        number = torch.zeros(1, device=self._device)
        self.collective(ranks, lambda group: dist.all_reduce(number, group=group, async_op=True))
        self.drain()

    def _greet(self, source: int, target: int) -> None:
        greeting = torch.zeros(1, device=self._device)
        if self._rank == source:
            self.send([greeting], target, 0)
        else:
            self.receive(greeting, source, 0)
        self.drain()

    def _remember(self, direction: tuple[int, ...], work: dist.Work, tensor: Tensor) -> None:
        messages = self._pending[direction]
        _reap(messages)
        messages.append((work, tensor))

    def _reap_all(self) -> int:
        """Let go of the messages that are over. Returns how many are left."""
        with self._nccl_errors():
            for messages in self._pending.values():
                _reap(messages)
        return sum(map(len, self._pending.values()))

    @contextlib.contextmanager
    def _nccl_errors(self) -> Iterator[None]:
        """Tell errors of the connection, which another rank causes, from those of this rank's own doing."""
        self.check()
        try:
            yield
        except dist.DistError as error:
            text = str(error)
            kind = TimeoutError if "timeout" in text.lower() else ConnectionError
            raise kind(text) from None


_POLL_SECONDS = 50e-6
_CHECK_SECONDS = 1.0


def _reap(messages: _Messages) -> None:
    """Let go of the messages that are over, oldest first. A message that failed is over, too.

    ``wait`` would raise the error as well. But before that it aborts the message's communicator alone; see
    ``_abort_together``.
    """
    while messages and messages[0][0].is_completed():
        work, _ = messages.popleft()
        if error := work.exception():
            raise ConnectionError(str(error))


def _abort_together(groups: Collection[dist.ProcessGroup]) -> None:
    """Abort the groups at the same time.

    An abort may wait for everything that runs on the GPU, so also for messages of the other groups. Those end
    when their own aborts begin, which must therefore not stand in line. An NCCL group call around the aborts,
    as in torch's ``_abort_process_group``, does not help: it holds for the calls of one thread, and torch
    aborts each process group on a thread of its own (2.11 to 2.13).
    """
    threads = [threading.Thread(target=_abort_one, args=(group,), name="pipec abort") for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort_one(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(RuntimeError):  # it took longer than the group's timeout
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


def transferable(tensor: Tensor) -> Tensor:
    """A contiguous tensor as NCCL takes it. One of a dtype that NCCL lacks is viewed as bytes."""
    return tensor if tensor.dtype in _NCCL_DTYPES else tensor.view(-1).view(torch.uint8)
