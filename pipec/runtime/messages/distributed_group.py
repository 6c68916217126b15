"""Collectives of ranks in several processes."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from pipec.runtime.messages.collective_group import CollectiveWait
from pipec.runtime.messages.connections import Collective, Connections, GlooConnections

# The names since torch 2.13, and before.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

ErrorContextFactory = Callable[[], AbstractContextManager[Connections]]
"""Makes a context with the connections, which turns their errors into TransportError."""


class DistributedGroup:
    """A group of ranks in several processes; this process has its ``index``-th rank.

    Over gloo, reduce-scatter and all-gather are point-to-point messages, because gloo's own collectives take
    two to three times as long. Sums are in the order of the ranks.

    torch sorts the ranks of a group, and the k-th part belongs to the k-th sorted rank. If ``ranks`` are in
    another order, parts are permuted before and after a collective.
    """

    def __init__(self, index: int, ranks: tuple[int, ...], error_context: ErrorContextFactory) -> None:
        self.index, self.size = index, len(ranks)
        self._ranks, self._error_context = ranks, error_context
        self._sorted = sorted(range(self.size), key=ranks.__getitem__)
        self._is_sorted = self._sorted == [*range(self.size)]

    def all_reduce(self, tensor: Tensor) -> CollectiveWait:
        return self._start(lambda group: dist.all_reduce(tensor, group=group, async_op=True))

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> CollectiveWait:
        with self._error_context() as connections:
            if not isinstance(connections, GlooConnections):
                parts = tensor if self._is_sorted else tensor.view(self.size, -1)[self._sorted].view(-1)
                return self._start(lambda group: _reduce_scatter(output, parts, group=group, async_op=True))
            outgoing = list(tensor.view(self.size, -1))
            incoming = [torch.empty_like(output) for _ in outgoing]
            swap = self._swap(connections, outgoing, incoming)

        def wait() -> None:
            swap()
            incoming[self.index] = outgoing[self.index]
            output.copy_(incoming[0])
            for part in incoming[1:]:
                output.add_(part)

        return wait

    def all_gather(self, output: Tensor, tensor: Tensor) -> CollectiveWait:
        with self._error_context() as connections:
            if not isinstance(connections, GlooConnections):
                return self._all_gather_sorted(output, tensor)
            parts = list(output.view(self.size, -1))
            if parts[self.index].data_ptr() != tensor.data_ptr():
                parts[self.index].copy_(tensor)
            return self._swap(connections, [tensor] * self.size, parts)

    def _all_gather_sorted(self, output: Tensor, tensor: Tensor) -> CollectiveWait:
        gathered = output if self._is_sorted else torch.empty_like(output)
        wait = self._start(lambda group: _all_gather(gathered, tensor, group=group, async_op=True))

        def wait_and_order() -> None:
            wait()
            output.view(self.size, -1)[self._sorted] = gathered.view(self.size, -1)

        return wait if self._is_sorted else wait_and_order

    def _swap(
        self, connections: GlooConnections, outgoing: list[Tensor], incoming: list[Tensor]
    ) -> CollectiveWait:
        """Send the k-th of ``outgoing`` to the k-th rank, and receive the k-th of ``incoming`` from it."""
        works = [
            work
            for k, rank in enumerate(self._ranks)
            if k != self.index
            for work in connections.start_exchange(self._ranks, rank, outgoing[k], incoming[k])
        ]

        def wait() -> None:
            with self._error_context():
                for work in works:
                    connections.wait(work)

        return wait

    def _start(self, collective: Collective) -> CollectiveWait:
        with self._error_context() as connections:
            work = connections.collective(self._ranks, collective)

        def wait() -> None:
            with self._error_context() as connections:
                connections.wait(work)

        return wait
