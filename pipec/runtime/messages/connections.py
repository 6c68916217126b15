"""What a transport needs of the connections between ranks in several processes.

``cpu`` has them for CPU tensors, ``nccl`` for CUDA tensors. Both raise ``ConnectionError`` if the other side
has died or closed. They wait without a limit: rank 0 times all waits, and all ranks close the connections
after the timeout.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from pipec.ir import Payload
from pipec.runtime.messages.collective_group import CollectiveWait

Direction = tuple[int, int]
"""A sending rank and a receiving rank."""

NO_LIMIT = timedelta(days=365)
"""The timeout of groups, which torch requires."""


class Group(Protocol):
    """What pipec calls of a ``ProcessGroupGloo`` or ``ProcessGroupNCCL``, which torch does not declare.

    Its ranks are numbered from 0 in the group itself.
    """

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work: ...

    def allreduce(self, tensors: list[Tensor]) -> dist.Work: ...

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]]) -> dist.Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work: ...

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor]) -> dist.Work:
        """Send the k-th input to rank k, whose tensor becomes the k-th output; any sizes, under NCCL."""

    def abort(self) -> None: ...

    def size(self) -> int: ...

    def rank(self) -> int: ...


MAX_IN_TRANSIT = 2
"""The most messages to one peer with one tag that are in transit at a time."""


class Work(Protocol):
    """A message that has been started."""

    def wait(self) -> object: ...


class Works:
    """The works of a message, one for each value."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Connections(Protocol):
    """One rank's connections to the others. The ranks of a collective are in the order of its parts."""

    def open(
        self, directions: Iterable[Direction], groups: Iterable[tuple[int, ...]], has_results: bool
    ) -> None:
        """Connect these ranks, those of collectives and, for results, all. Every rank calls this alike."""

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int, payload: Payload) -> None:
        """Start to send contiguous tensors, and keep them alive until they are sent."""

    def receive(self, tensors: Sequence[Tensor], peer: int, tag: int, payload: Payload) -> Work:
        """Start to receive a message into contiguous tensors."""

    def wait(self, work: Work) -> None:
        """Wait until operators that this thread launches may read what was received."""

    def all_reduce(self, ranks: tuple[int, ...], tensor: Tensor) -> CollectiveWait:
        """Start to put the sum of every rank's tensor into each of them."""

    def reduce_scatter(self, ranks: tuple[int, ...], output: Tensor, tensor: Tensor) -> CollectiveWait:
        """Start to put this rank's part of the sum of every rank's tensor into ``output``."""

    def all_gather(self, ranks: tuple[int, ...], output: Tensor, tensor: Tensor) -> CollectiveWait:
        """Start to put every rank's tensor into ``output``, one after the other."""

    def drain(self) -> None:
        """Wait until every message is complete."""

    def check(self) -> None:
        """Raise ConnectionError if messages were aborted, and results since then are invalid."""

    def close(self) -> None:
        """Close all connections for good. Ranks that wait for this one get an error."""
