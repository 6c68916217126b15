"""Hierarchical collectives over gloo: within each host, then between hosts."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor

from pipec.runtime.messages.collective_group import CollectiveWait
from pipec.runtime.messages.connections import GlooConnections
from pipec.runtime.messages.distributed_group import ErrorContextFactory

_INSIDE, _ACROSS = 1, 2
"""The tags of messages within a host, and between hosts."""


class HierarchicalGroup:
    """The ``index``-th rank of a group on ``num_hosts``, with equally many consecutive ranks on each.

    To reduce, the members of a host reduce-scatter first; then each reduces its part with the corresponding
    members of the other hosts. To gather, it is the other way round. So the link of a host carries every byte
    once, instead of once for each member. Sums are in the order of the ranks of a host, and then of the
    hosts.

    The steps of a collective wait for each other. They run on ``background``, one collective after another,
    in the order in which this process starts them.
    """

    def __init__(
        self,
        index: int,
        ranks: tuple[int, ...],
        num_hosts: int,
        error_context: ErrorContextFactory,
        connections: GlooConnections,
        background: Executor,
    ) -> None:
        self.index, self.size = index, len(ranks)
        self._ranks, self._hosts, self._members = ranks, num_hosts, len(ranks) // num_hosts
        self._error_context, self._connections, self._background = error_context, connections, background
        host, member = divmod(index, self._members)
        self._inside = range(host * self._members, (host + 1) * self._members)
        self._across = range(member, self.size, self._members)

    def all_reduce(self, tensor: Tensor) -> CollectiveWait:
        return self._start(self._all_reduce, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> CollectiveWait:
        return self._start(self._reduce_scatter, output, tensor)

    def all_gather(self, output: Tensor, tensor: Tensor) -> CollectiveWait:
        return self._start(self._all_gather, output, tensor)

    def _start(self, collective: Callable[..., None], *tensors: Tensor) -> CollectiveWait:
        running = self._background.submit(collective, *tensors)

        def wait() -> None:
            with self._error_context():
                running.result()

        return wait

    def _all_reduce(self, tensor: Tensor) -> None:
        """Reduce parts, then gather them. The tensor is padded to equal parts."""
        width = -(-tensor.numel() // self.size)
        whole = tensor.view(-1)
        if len(whole) < width * self.size:
            whole = torch.cat([whole, whole.new_zeros(width * self.size - len(whole))])
        part = whole.new_empty(width)
        self._reduce_scatter(part, whole)
        self._all_gather(whole, part)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole[: tensor.numel()].view(tensor.shape))

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        parts = tensor.view(self._hosts, self._members, -1)
        own = _summed(self._swap(self._inside, list(parts.transpose(0, 1)), _INSIDE))
        output.view(-1).copy_(_summed(self._swap(self._across, list(own), _ACROSS)))

    def _all_gather(self, output: Tensor, tensor: Tensor) -> None:
        part = tensor.reshape(-1)
        across = self._swap(self._across, [part] * self._hosts, _ACROSS)
        inside = self._swap(self._inside, [torch.stack(across)] * self._members, _INSIDE)
        torch.stack(inside, 1, out=output.view(self._hosts, self._members, -1))

    def _swap(self, indices: Sequence[int], outgoing: Sequence[Tensor], tag: int) -> list[Tensor]:
        """Send the k-th tensor to the k-th of these ranks; returns the tensors that they send to this one."""
        sent = [tensor.contiguous() for tensor in outgoing]
        incoming = [
            own if k == self.index else torch.empty_like(own) for k, own in zip(indices, sent, strict=True)
        ]
        works = [
            work
            for k, own, other in zip(indices, sent, incoming, strict=True)
            if k != self.index
            for work in self._connections.start_exchange(self._ranks, self._ranks[k], own, other, tag)
        ]
        for work in works:
            self._connections.wait(work)
        return incoming


def _summed(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
