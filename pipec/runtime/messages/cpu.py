"""Connections for CPU tensors: shared memory between ranks of one host, gloo for everything else."""

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipec.ir import Payload
from pipec.runtime.messages.collective_group import CollectiveWait
from pipec.runtime.messages.connections import MAX_IN_TRANSIT, NO_LIMIT, Direction, Work
from pipec.runtime.messages.shared_memory import SharedMemory


class GlooConnections:
    """One group of all ranks. Messages between two ranks do not wait for each other if their tags differ.

    The group is called directly. ``isend`` and ``irecv`` do the same after checks, which take longer than the
    call.

    gloo reports the end of a send only to a wait. Each send therefore waits for the last but one message to
    the same peer with the same tag, which has ended already unless the peer is far behind.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=NO_LIMIT)
        self._sends: dict[tuple[int, int], deque[list[tuple[Work, Tensor]]]] = defaultdict(deque)

    def start_send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start to send a contiguous tensor, which the caller keeps alive."""
        with gloo_errors():
            return require_work(self._group.send([tensor], peer, tag))

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> None:
        """Start to send contiguous tensors, and keep them alive until they are sent."""
        in_transit = self._sends[peer, tag]
        if len(in_transit) == MAX_IN_TRANSIT:
            self._wait_for(in_transit.popleft())
        in_transit.append([(self.start_send(tensor, peer, tag), tensor) for tensor in tensors])

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start to receive into ``tensor``."""
        with gloo_errors():
            return require_work(self._group.recv([tensor], peer, tag))

    def wait(self, work: Work) -> None:
        """Wait until a message is complete."""
        with gloo_errors():
            work.wait()

    def drain(self) -> None:
        """Wait until every message is sent."""
        for in_transit in list(self._sends.values()):
            while in_transit:
                self._wait_for(in_transit.popleft())

    def close(self) -> None:
        """Close all connections for good. Ranks that wait for this one get an error."""
        close_group(self._group)

    def _wait_for(self, message: list[tuple[Work, Tensor]]) -> None:
        for work, _ in message:
            self.wait(work)


class CpuConnections:
    """The connections of programs.

    Values that every microbatch sends go through shared memory to ranks that share it: the files of others,
    such as weights, would stay for ever.

    Reduce-scatter and all-gather are point-to-point messages, because gloo's own collectives take two to
    three times as long. Sums are in the order of the ranks.
    """

    def __init__(self, rank: int, gloo: GlooConnections, shared: SharedMemory) -> None:
        self._rank, self._gloo, self._shared = rank, gloo, shared
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._tags: dict[tuple[int, ...], int] = {}

    def open(
        self, directions: Iterable[Direction], groups: Iterable[tuple[int, ...]], has_results: bool
    ) -> None:
        """Make the groups. The ranks of directions are connected already."""
        for ranks in sorted({*groups} - self._groups.keys()):
            with gloo_errors():
                self._groups[ranks] = dist.new_group(list(ranks), NO_LIMIT, "gloo")
            self._tags[ranks] = _FIRST_TAG_OF_GROUPS + len(self._tags)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int, payload: Payload) -> None:
        self._route(peer, payload).send(tensors, peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int, payload: Payload) -> Work:
        return self._route(peer, payload).receive(tensor, peer, tag)

    def _route(self, peer: int, payload: Payload) -> GlooConnections | SharedMemory:
        return self._shared if payload.feeds_compute and peer in self._shared.peers else self._gloo

    def wait(self, work: Work) -> None:
        self._gloo.wait(work)

    def all_reduce(self, ranks: tuple[int, ...], tensor: Tensor) -> CollectiveWait:
        with gloo_errors():
            work = require_work(dist.all_reduce(tensor, group=self._groups[ranks], async_op=True))
        return lambda: self.wait(work)

    def reduce_scatter(self, ranks: tuple[int, ...], output: Tensor, tensor: Tensor) -> CollectiveWait:
        outgoing = list(tensor.view(len(ranks), -1))
        incoming = [
            part if rank == self._rank else torch.empty_like(output)
            for rank, part in zip(ranks, outgoing, strict=True)
        ]
        swap = self._swap(ranks, outgoing, incoming)

        def wait() -> None:
            swap()
            output.copy_(incoming[0])
            for part in incoming[1:]:
                output.add_(part)

        return wait

    def all_gather(self, ranks: tuple[int, ...], output: Tensor, tensor: Tensor) -> CollectiveWait:
        parts = list(output.view(len(ranks), -1))
        own = parts[ranks.index(self._rank)]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor)
        return self._swap(ranks, [tensor] * len(ranks), parts)

    def _swap(
        self, ranks: tuple[int, ...], outgoing: Sequence[Tensor], incoming: Sequence[Tensor]
    ) -> CollectiveWait:
        """Send the k-th of ``outgoing`` to the k-th rank, and receive the k-th of ``incoming`` from it."""
        gloo, tag = self._gloo, self._tags[ranks]
        works = [
            work
            for rank, sent, received in zip(ranks, outgoing, incoming, strict=True)
            if rank != self._rank
            for work in (gloo.receive(received, rank, tag), gloo.start_send(sent, rank, tag))
        ]

        def wait() -> None:
            for work in works:
                self.wait(work)

        return wait

    def drain(self) -> None:
        self._gloo.drain()

    def check(self) -> None:
        """Do nothing: waiting for an aborted message has raised an error."""

    def close(self) -> None:
        self._shared.close()
        for ranks, group in self._groups.items():
            if self._rank in ranks:
                close_group(group)


_FIRST_TAG_OF_GROUPS = 2**30
"""Messages of a program have the small numbers of its links."""

_UNUSED_TAG = 2**31 - 1


def close_group(group: dist.ProcessGroup) -> None:
    """Let a receive from each peer time out: gloo then closes every connection of the group.

    ``abort`` and ``shutdown`` of a gloo group close nothing (torch 2.13).
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


@contextlib.contextmanager
def gloo_errors() -> Iterator[None]:
    """Turn torch's errors into ConnectionError."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(str(error)) from None


def require_work(work: dist.Work | None) -> dist.Work:
    """The work that torch returns to the members of a group."""
    assert work is not None, "this rank is not a member of the group"
    return work
