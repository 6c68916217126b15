"""Collectives of the ranks of one process, between threads."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

CollectiveWait = Callable[[], None]
"""Waits until a collective is complete. Raises TransportError if it cannot complete."""


class CollectiveGroup(Protocol):
    """A group of ranks, seen from its ``index``-th of ``size`` members.

    All ranks start the same collectives in the same order. A rank waits for the others when it calls the
    function that a collective returns. Until then, the tensors must not be used.
    """

    index: int
    size: int

    def all_reduce(self, tensor: Tensor) -> CollectiveWait:
        """Put the sum of every rank's tensor into each of them."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> CollectiveWait:
        """Put the ``index``-th of ``size`` equal parts of the sum of every rank's tensor into ``output``."""

    def all_gather(self, output: Tensor, tensor: Tensor) -> CollectiveWait:
        """Put every rank's tensor into ``output``, one after the other."""


class InProcessCollectives:
    """The collectives of ``size`` threads. ``check`` raises if the ranks have stopped."""

    def __init__(self, size: int, check: Callable[[], None]) -> None:
        self.size = size
        self._check = check
        self._lock = threading.Lock()
        self._num_started: list[int] = [0] * size
        self._in_process_collectives: dict[int, _Collective] = {}

    def start(self, index: int, tensors: Sequence[Tensor], finish: "CollectiveFunction") -> CollectiveWait:
        """Join the next collective; the last thread to join runs ``finish`` on the inputs of all."""
        self._check()
        with self._lock:
            number = self._num_started[index]
            self._num_started[index] += 1
            collective = self._in_process_collectives.setdefault(number, _Collective())
            collective.inputs[index] = tensors
            complete = len(collective.inputs) == self.size
        if complete:
            finish([collective.inputs[each] for each in range(self.size)])
            collective.done.set()
            with self._lock:
                self._in_process_collectives.pop(number, None)

        def wait() -> None:
            collective.done.wait()
            self._check()

        return wait

    def wake(self) -> None:
        """Wake waiting threads, so that they notice that the ranks have stopped."""
        with self._lock:
            for collective in self._in_process_collectives.values():
                collective.done.set()

    def clear(self) -> None:
        with self._lock:
            self._num_started = [0] * self.size
            self._in_process_collectives.clear()


CollectiveFunction = Callable[[Sequence[Sequence[Tensor]]], None]


class _Collective:
    def __init__(self) -> None:
        self.inputs: dict[int, Sequence[Tensor]] = {}
        self.done = threading.Event()


class InProcessGroup:
    """A group of ranks of this process. Sums are in the order of the ranks."""

    def __init__(self, in_process_collectives: InProcessCollectives, index: int) -> None:
        self.index, self.size = index, in_process_collectives.size
        self._in_process_collectives = in_process_collectives

    def all_reduce(self, tensor: Tensor) -> CollectiveWait:
        return self._in_process_collectives.start(self.index, [tensor], _all_reduce)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> CollectiveWait:
        return self._in_process_collectives.start(self.index, [output, tensor], _reduce_scatter)

    def all_gather(self, output: Tensor, tensor: Tensor) -> CollectiveWait:
        return self._in_process_collectives.start(self.index, [output, tensor], _all_gather)


def _all_reduce(inputs: Sequence[Sequence[Tensor]]) -> None:
    total, *others = (tensor for (tensor,) in inputs)
    for other in others:
        total += other.to(total.device)
    for other in others:
        other.copy_(total)


def _reduce_scatter(inputs: Sequence[Sequence[Tensor]]) -> None:
    for index, (output, own) in enumerate(inputs):
        part = slice(index * output.numel(), (index + 1) * output.numel())
        terms = [tensor[part].to(own.device) for _, tensor in inputs]
        total = terms[0].clone()
        for term in terms[1:]:
            total += term
        output.copy_(total)


def _all_gather(inputs: Sequence[Sequence[Tensor]]) -> None:
    parts = [tensor.clone() for _, tensor in inputs]
    for output, _ in inputs:
        torch.cat([part.to(output.device) for part in parts], out=output)
