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
from pipec.runtime.messages.connections import MAX_IN_TRANSIT, NO_LIMIT, Direction, Work, Works
from pipec.runtime.messages.shared_memory import SharedMemory


class CpuConnections:
    """One gloo group of all ranks, and shared memory.

    Values that every microbatch sends go through shared memory to ranks that share it: the places of others,
    such as weights, would stay for ever.

    Messages between two ranks do not wait for each other if their tags differ. The group is called directly:
    ``isend`` and ``irecv`` do the same after checks, which take longer than the call. gloo reports the end of
    a send only to a wait. Each send therefore waits for the last but one message to the same peer with the
    same tag, which has ended already unless the peer is far behind.

    Reduce-scatter and all-gather are point-to-point messages, because gloo's own collectives take two to
    three times as long. Sums are in the order of the ranks.
    """

    def __init__(self, shared: SharedMemory) -> None:
        self._group, self._shared = dist.new_group(backend="gloo", timeout=NO_LIMIT), shared
        self._sends: dict[tuple[int, int], deque[tuple[Works, Sequence[Tensor]]]] = defaultdict(deque)
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

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int, payload: Payload = Payload.RESULT) -> None:
        if payload.feeds_compute and peer in self._shared.peers:
            self._shared.send(tensors, peer, tag)
            return
        in_transit = self._sends[peer, tag]
        if len(in_transit) == MAX_IN_TRANSIT:
            self.wait(in_transit.popleft()[0])
        in_transit.append((Works([self.start_send(tensor, peer, tag) for tensor in tensors]), tensors))

    def start_send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start to send a contiguous tensor by gloo. The caller keeps it alive."""
        with gloo_errors():
            return require_work(self._group.send([tensor], peer, tag))

    def receive(
        self, tensors: Sequence[Tensor], peer: int, tag: int, payload: Payload = Payload.RESULT
    ) -> Work:
        if payload.feeds_compute and peer in self._shared.peers:
            return self._shared.receive(tensors, peer, tag)
        with gloo_errors():
            return Works([require_work(self._group.recv([tensor], peer, tag)) for tensor in tensors])

    def wait(self, work: Work) -> None:
        with gloo_errors():
            work.wait()

    def all_reduce(self, ranks: tuple[int, ...], tensor: Tensor) -> CollectiveWait:
        with gloo_errors():
            work = require_work(dist.all_reduce(tensor, group=self._groups[ranks], async_op=True))
        return lambda: self.wait(work)

    def reduce_scatter(self, ranks: tuple[int, ...], output: Tensor, tensor: Tensor) -> CollectiveWait:
        outgoing, own = list(tensor.view(len(ranks), -1)), self._group.rank()
        incoming = [
            part if rank == own else torch.empty_like(output)
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
        own = parts[ranks.index(self._group.rank())]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor)
        return self._swap(ranks, [tensor] * len(ranks), parts)

    def _swap(
        self, ranks: tuple[int, ...], outgoing: Sequence[Tensor], incoming: Sequence[Tensor]
    ) -> CollectiveWait:
        """Send the k-th of ``outgoing`` to the k-th rank, and receive the k-th of ``incoming`` from it."""
        tag = self._tags[ranks]
        works = [
            work
            for rank, sent, received in zip(ranks, outgoing, incoming, strict=True)
            if rank != self._group.rank()
            for work in (self.receive([received], rank, tag), self.start_send(sent, rank, tag))
        ]
        return lambda: self.wait(Works(works))

    def drain(self) -> None:
        for in_transit in list(self._sends.values()):
            while in_transit:
                self.wait(in_transit.popleft()[0])

    def check(self) -> None:
        """Do nothing: waiting for an aborted message has raised an error."""

    def close(self) -> None:
        self._shared.close()
        own = self._group.rank()
        for group in (self._group, *(group for ranks, group in self._groups.items() if own in ranks)):
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
