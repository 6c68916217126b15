"""Collectives of the ranks of one process: threads that meet."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipec.runtime.memory.meter import uncounted

Wait = Callable[[], None]
"""Waits until a collective is over. Raises TransportError if it never will be."""


class Group(Protocol):
    """Some ranks as one of them, the ``index``-th of ``size``, sees them.

    All of them start the same collectives in the same order. None waits for the others before it calls what
    a collective returns. Until then, nobody touches the tensors.
    """

    index: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Wait:
        """Put the sum of every rank's tensor into each of them."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Wait:
        """Put the ``index``-th of ``size`` equal parts of the sum of every rank's tensor into ``output``."""

    def all_gather(self, output: Tensor, tensor: Tensor) -> Wait:
        """Put every rank's tensor into ``output``, one after the other."""


class Meetings:
    """Where ``size`` threads meet, time and again. ``check`` raises if the ranks have stopped."""

    def __init__(self, size: int, check: Callable[[], None]) -> None:
        self.size = size
        self._check = check
        self._lock = threading.Lock()
        self._joined: list[int] = [0] * size
        self._meetings: dict[int, _Meeting] = {}

    def join(self, index: int, tensors: Sequence[Tensor], finish: "Finish") -> Wait:
        """Bring tensors to the next meeting; the last to come runs ``finish`` on what all have brought."""
        self._check()
        with self._lock:
            number = self._joined[index]
            self._joined[index] += 1
            meeting = self._meetings.setdefault(number, _Meeting())
            meeting.brought[index] = tensors
            complete = len(meeting.brought) == self.size
            if complete:
                del self._meetings[number]
        if complete:
            with uncounted():
                finish([meeting.brought[each] for each in range(self.size)])
            meeting.over.set()

        def wait() -> None:
            meeting.over.wait()
            self._check()

        return wait

    def wake(self) -> None:
        """Let whoever waits notice that the ranks have stopped."""
        with self._lock:
            for meeting in self._meetings.values():
                meeting.over.set()

    def clear(self) -> None:
        with self._lock:
            self._joined = [0] * self.size
            self._meetings.clear()


Finish = Callable[[Sequence[Sequence[Tensor]]], None]


class _Meeting:
    def __init__(self) -> None:
        self.brought: dict[int, Sequence[Tensor]] = {}
        self.over = threading.Event()


class ThreadGroup:
    """A group of ranks of this process. Sums are in the order of the ranks."""

    def __init__(self, meetings: Meetings, index: int) -> None:
        self.index, self.size = index, meetings.size
        self._meetings = meetings

    def all_reduce(self, tensor: Tensor) -> Wait:
        return self._meetings.join(self.index, [tensor], _all_reduce)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Wait:
        return self._meetings.join(self.index, [output, tensor], _reduce_scatter)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Wait:
        return self._meetings.join(self.index, [output, tensor], _all_gather)


def _all_reduce(brought: Sequence[Sequence[Tensor]]) -> None:
    total, *others = (tensor for (tensor,) in brought)
    for other in others:
        total += other.to(total.device)
    for other in others:
        other.copy_(total)


def _reduce_scatter(brought: Sequence[Sequence[Tensor]]) -> None:
    for index, (output, own) in enumerate(brought):
        part = slice(index * output.numel(), (index + 1) * output.numel())
        terms = [tensor[part].to(own.device) for _, tensor in brought]
        total = terms[0].clone()
        for term in terms[1:]:
            total += term
        output.copy_(total)


def _all_gather(brought: Sequence[Sequence[Tensor]]) -> None:
    parts = [tensor.clone() for _, tensor in brought]
    for output, _ in brought:
        torch.cat([part.to(output.device) for part in parts], out=output)
