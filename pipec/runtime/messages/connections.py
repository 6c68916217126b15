"""Point-to-point connections between the ranks of a process group; over gloo, for CPU tensors.

``pipec.runtime.messages.nccl`` has the connections over NCCL, for CUDA tensors. Both raise
``ConnectionError`` if the other side has died or closed. They wait without a limit: rank 0 times all
waits, and all ranks close the connections after the timeout.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Direction = tuple[int, int]
"""A sending rank and a receiving rank."""

NO_LIMIT = timedelta(days=365)
"""The timeout of groups, which torch requires."""

MAX_IN_TRANSIT = 2
"""The most messages to one peer with one tag that are in transit at a time."""

Collective = Callable[[dist.ProcessGroup], dist.Work | None]
"""Starts a collective of the ranks of a process group."""


class Work(Protocol):
    """A message, or a collective, that has been started."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Connections(Protocol):
    """One rank's connections to the others."""

    def open(self, directions: Iterable[Direction]) -> None:
        """Connect these ranks. Every rank calls this with the same directions."""

    def open_results(self) -> None:
        """Connect all ranks for results. Every rank calls this."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        """Start to send contiguous tensors, and keep them alive until they are sent."""

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start to receive into ``tensor``."""

    def send_result(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        """As ``send``, for ``receive_result``."""

    def receive_result(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """As ``receive``, for messages awaited after all others."""

    def open_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Connect groups for collectives. Every rank calls this with the same groups."""

    def collective(self, ranks: tuple[int, ...], start: Collective) -> Work:
        """Start a collective of a group."""

    def wait(self, work: Work) -> None:
        """Wait until operators that this thread launches may read the received tensors."""

    def drain(self) -> None:
        """Wait until every message is complete."""

    def check(self) -> None:
        """Raise ConnectionError if messages were aborted, and results since then are invalid."""

    def close(self) -> None:
        """Close all connections for good. Ranks that wait for this one get an error."""


class GlooConnections:
    """One group of all ranks. Messages between two ranks do not wait for each other if their tags differ.

    The group is called directly. ``isend`` and ``irecv`` do the same after checks, which take longer than the
    call.

    gloo reports the end of a send only to a wait. Each send therefore waits for the last but one message to
    the same peer with the same tag, which has ended already unless the peer is far behind.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._group = dist.new_group(backend="gloo", timeout=NO_LIMIT)
        self._sends: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)

    def open(self, directions: Iterable[Direction]) -> None:
        """Do nothing: gloo connected all ranks when it made the group."""

    def open_results(self) -> None:
        """Do nothing: gloo connected all ranks when it made the group."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        in_transit, send = self._sends[peer, tag], self._group.send
        try:
            if len(in_transit) == MAX_IN_TRANSIT:
                _wait(in_transit.popleft())
            in_transit.append([(send([tensor], peer, tag), tensor) for tensor in tensors])
        except RuntimeError as error:
            raise ConnectionError(str(error)) from None

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        try:
            return require_work(self._group.recv([tensor], peer, tag))
        except RuntimeError as error:
            raise ConnectionError(str(error)) from None

    def send_result(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        self.send(tensors, peer, tag)

    def receive_result(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        return self.receive(tensor, peer, tag)

    def open_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        for ranks in sorted({*groups} - self._groups.keys()):
            with _gloo_errors():
                self._groups[ranks] = dist.new_group(list(ranks), NO_LIMIT, "gloo")

    def collective(self, ranks: tuple[int, ...], start: Collective) -> dist.Work:
        with _gloo_errors():
            return require_work(start(self._groups[ranks]))

    def start_exchange(
        self, ranks: tuple[int, ...], peer: int, outgoing: Tensor, incoming: Tensor, tag: int = 0
    ) -> list[dist.Work]:
        """Start to send a tensor to another rank of a group, and to receive one from it."""
        group = self._groups[ranks]
        with _gloo_errors():
            return [
                require_work(dist.irecv(incoming, peer, group=group, tag=tag)),
                require_work(dist.isend(outgoing, peer, group=group, tag=tag)),
            ]

    def wait(self, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise ConnectionError(str(error)) from None

    def drain(self) -> None:
        with _gloo_errors():
            for in_transit in self._sends.values():
                while in_transit:
                    _wait(in_transit.popleft())

    def check(self) -> None:
        """Do nothing: waiting for an aborted message has raised an error."""

    def close(self) -> None:
        """Let a receive from each peer time out: gloo then closes every connection of the group.

        ``abort`` and ``shutdown`` of a gloo group close nothing (torch 2.13).
        """
        members = [group for ranks, group in self._groups.items() if self._rank in ranks]
        for group in (self._group, *members):
            for peer in range(group.size()):
                if peer != group.rank():
                    with contextlib.suppress(RuntimeError):
                        group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


_UNUSED_TAG = 2**31 - 1


@contextlib.contextmanager
def _gloo_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error)) from None


_Message = list[tuple[dist.Work, Tensor]]
"""The tensors of one message and their sends."""


def _wait(message: _Message) -> None:
    for work, _ in message:
        work.wait()


def require_work(work: dist.Work | None) -> dist.Work:
    """The work that torch returns to the members of a group."""
    assert work is not None, "this rank is not a member of the group"
    return work
