"""Point-to-point connections between the ranks of a process group: gloo for CPU, NCCL for CUDA tensors.

Both raise the same errors: ``TimeoutError`` when a message takes too long, and ``ConnectionError`` when the
other side is gone or has closed.
"""

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Direction = tuple[int, int]
"""A sending rank and a receiving rank."""


class Connections(Protocol):
    """One rank's connections to the others."""

    def open(self, directions: Iterable[Direction]) -> None:
        """Connect these ranks. Every rank calls this with the same directions."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        """Start to send contiguous tensors, and keep them alive until they have left."""

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start to receive into ``tensor``."""

    def wait(self, work: dist.Work) -> None:
        """Wait until the operators that this thread launches next may read what was received."""

    def drain(self) -> None:
        """Wait until every message is over."""

    def close(self) -> None:
        """Close all connections for good. Every other rank that waits for this one notices."""


class GlooConnections:
    """One group of all ranks. Messages between two ranks do not wait for each other if their tags differ.

    gloo tells that a send is over only to those who wait for it. Before a message is sent, the last but one
    of the same peer and tag is therefore waited for. It is over already, unless the peer is far behind.
    """

    def __init__(self, rank: int, num_ranks: int, timeout: float) -> None:
        self._peers = [peer for peer in range(num_ranks) if peer != rank]
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._sends: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)

    def open(self, directions: Iterable[Direction]) -> None:
        """Do nothing: gloo connected all ranks when it made the group."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        under_way = self._sends[peer, tag]
        with _gloo_errors():
            if len(under_way) == _MOST_UNDER_WAY:
                _wait(under_way.popleft())
            under_way.append(
                [(_work(dist.isend(tensor, peer, group=self._group, tag=tag)), tensor) for tensor in tensors]
            )

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        with _gloo_errors():
            return _work(dist.irecv(tensor, peer, group=self._group, tag=tag))

    def wait(self, work: dist.Work) -> None:
        with _gloo_errors():
            work.wait()

    def drain(self) -> None:
        with _gloo_errors():
            for under_way in self._sends.values():
                while under_way:
                    _wait(under_way.popleft())

    def close(self) -> None:
        """Let a receive from each peer time out: gloo then closes every connection of the group.

        ``abort`` and ``shutdown`` of a gloo group close nothing (torch 2.13).
        """
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                work = dist.irecv(torch.empty(1), peer, group=self._group, tag=_UNUSED_TAG)
                _work(work).wait(timedelta(milliseconds=1))


_UNUSED_TAG = 2**31 - 1


@contextlib.contextmanager
def _gloo_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        kind = TimeoutError if "Timed out" in str(error) else ConnectionError
        raise kind(str(error)) from None


_Message = list[tuple[dist.Work, Tensor]]
"""The tensors of one message and their sends."""

_MOST_UNDER_WAY = 2
"""How many messages of one peer and tag are sent at a time: one that the peer reads now, and the next."""


def _wait(message: _Message) -> None:
    for work, _ in message:
        work.wait()


class NcclConnections:
    """A group of two ranks for every direction.

    NCCL has no tags and matches the messages of a group in order. With a group of its own, a direction's
    messages wait for each other alone, and both ranks have them in the same order.

    A wait for a message happens on the GPU's stream. The host waits in ``drain`` only; there it also asks
    ``is_failed`` whether another rank has failed.
    """

    def __init__(
        self, device: torch.device, rank: int, timeout: float, is_failed: Callable[[], bool]
    ) -> None:
        self._device = device
        self._rank = rank
        self._timeout = timeout
        self._is_failed = is_failed
        self._groups: dict[Direction, dist.ProcessGroup] = {}
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()

    def open(self, directions: Iterable[Direction]) -> None:
        """Make the groups, and send a first message over each: the first use of a group blocks.

        All ranks do so in the same order, so that none blocks on a group that the other comes to later.
        """
        for direction in sorted(set(directions) - self._groups.keys()):
            # NCCL's own watchdog ends the process, so it must be slower than `drain`.
            group = dist.new_group(list(direction), timedelta(seconds=2 * self._timeout), "nccl")
            self._groups[direction] = group
            if self._rank in direction:
                self._greet(*direction)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        for tensor in tensors:
            self._remember(_work(dist.isend(tensor, peer, group=self._groups[self._rank, peer])), tensor)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        work = _work(dist.irecv(tensor, peer, group=self._groups[peer, self._rank]))
        self._remember(work, tensor)
        return work

    def wait(self, work: dist.Work) -> None:
        work.wait()

    def drain(self) -> None:
        deadline = time.monotonic() + self._timeout
        next_check = time.monotonic() + _CHECK_SECONDS
        while self._reap():
            now = time.monotonic()
            if now > deadline:
                raise TimeoutError(f"NCCL messages are still under way after {self._timeout} s")
            if now > next_check:
                next_check = now + _CHECK_SECONDS
                if self._is_failed():
                    raise ConnectionError("another rank failed")
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Abort the kernels that wait for a peer. Peers abort theirs when they see that this rank failed."""
        for group in self._groups.values():
            group.abort()
        self._pending.clear()

    def _greet(self, source: int, target: int) -> None:
        greeting = torch.zeros(1, device=self._device)
        if self._rank == source:
            self.send([greeting], target, 0)
        else:
            self.receive(greeting, source, 0)
        self.drain()

    def _remember(self, work: dist.Work, tensor: Tensor) -> None:
        self._reap()
        self._pending.append((work, tensor))

    def _reap(self) -> bool:
        """Let go of the messages that are over, oldest first. Returns whether others are left."""
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()
        return bool(self._pending)


_POLL_SECONDS = 50e-6
_CHECK_SECONDS = 1.0


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not a member of the group"
    return work
