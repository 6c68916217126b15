"""Connections for CPU tensors: shared memory between ranks of one host, gloo for everything else."""

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from pipec.ir import Payload
from pipec.runtime.messages.collective_group import CollectiveWait
from pipec.runtime.messages.connections import MAX_IN_TRANSIT, NO_LIMIT, Direction, Group, Work, Works
from pipec.runtime.messages.shared_memory import SharedMemory


class CpuConnections:
    """One gloo group of all ranks, and shared memory.

    Groups find each other by ``store``, which is of this pipeline alone. No other process takes part.

    Values that every microbatch sends go through shared memory to ranks that share it: the places of others,
    such as weights, would stay for ever.

    Messages between two ranks do not wait for each other if their tags differ. The group is called directly:
    ``isend`` and ``irecv`` do the same after checks, which take longer than the call. gloo reports the end of
    a send only to a wait. Each send therefore waits for the last but one message to the same peer with the
    same tag, which has ended already unless the peer is far behind.

    Reduce-scatter and all-gather are point-to-point messages, because gloo's own collectives take two to
    three times as long. Sums are in the order of the ranks.
    """

    def __init__(self, shared: SharedMemory, store: dist.Store, rank: int, num_ranks: int) -> None:
        self._shared, self._store, self._rank = shared, store, rank
        self._group = self._make_group("messages", tuple(range(num_ranks)))
        self._sends: dict[tuple[int, int], deque[tuple[Works, Sequence[Tensor]]]] = defaultdict(deque)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._tags: dict[tuple[int, ...], int] = {}

    def open(
        self, directions: Iterable[Direction], groups: Iterable[tuple[int, ...]], has_results: bool
    ) -> None:
        """Make the groups. The ranks of directions are connected already."""
        for ranks in sorted({*groups} - self._tags.keys()):
            self._tags[ranks] = _FIRST_TAG_OF_GROUPS + len(self._tags)
            if self._rank in ranks:
                self._groups[ranks] = self._make_group(f"collectives {ranks}", ranks)

    def _make_group(self, name: str, ranks: tuple[int, ...]) -> Group:
        """A group of these ranks, which alone make it; the k-th of them is its rank k."""
        store = dist.PrefixStore(f"gloo/{name}", self._store)
        with gloo_errors():
            made = dist.ProcessGroupGloo(store, ranks.index(self._rank), len(ranks), NO_LIMIT)
        return cast(Group, made)

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
            return self._group.send([tensor], peer, tag)

    def receive(
        self, tensors: Sequence[Tensor], peer: int, tag: int, payload: Payload = Payload.RESULT
    ) -> Work:
        if payload.feeds_compute and peer in self._shared.peers:
            return self._shared.receive(tensors, peer, tag)
        with gloo_errors():
            return Works([self._group.recv([tensor], peer, tag) for tensor in tensors])

    def wait(self, work: Work) -> None:
        with gloo_errors():
            work.wait()

    def all_reduce(self, ranks: tuple[int, ...], tensor: Tensor) -> CollectiveWait:
        with gloo_errors():
            work = self._groups[ranks].allreduce([tensor])
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
        tag = self._tags[ranks]
        works = [
            work
            for rank, sent, received in zip(ranks, outgoing, incoming, strict=True)
            if rank != self._rank
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
        for group in (self._group, *self._groups.values()):
            close_group(group)


_FIRST_TAG_OF_GROUPS = 2**30
"""Messages of a program have the small numbers of its links."""

_UNUSED_TAG = 2**31 - 1


def close_group(group: Group) -> None:
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
