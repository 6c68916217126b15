"""NCCL among threads: ranks of one process that talk over ``NcclConnections``, without a GPU.

As on a GPU, a group has one stream on each of its ranks, which works on one message after the other. A send
lasts until the other rank has received it. Delays are random. A message that has arrived is found to be over
only some time later, as if the host were ahead of the device.

What computes is the CPU: a wait for a message holds up the thread of its rank.
"""

import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipec.runtime.messages.collective_group import InProcessCollectives, InProcessGroup
from pipec.runtime.messages.distributed_transport import DistributedTransport
from pipec.runtime.messages.nccl import NcclConnections
from pipec.runtime.processes.star import Star

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds after which a message that waits for the other rank gives up, and so ends the test."""


class Work:
    """The ``number``-th of the messages of a group on a rank, or several at once.

    It is found to be over when it has been asked for ``lag`` times, or one behind it has.
    """

    def __init__(self, group: "Group", number: int, lag: int) -> None:
        self._group, self._number, self._lag = group, number, lag
        self.over = threading.Event()

    def wait(self) -> None:
        assert self.over.wait(PATIENCE), "a message never ended"

    def is_completed(self) -> bool:
        self._lag -= self.over.is_set()
        if self._lag < 0:
            self._group.num_found_over = max(self._group.num_found_over, self._number)
        return self._number <= self._group.num_found_over

    def get_future_result(self) -> "torch.futures.Future[int]":
        """Its result, which torch sets later than the message is over, or never."""
        return torch.futures.Future()


class Message(NamedTuple):
    """A tensor that a rank sends to a peer, or receives from it; peers are numbered in the group."""

    is_sent: bool
    tensor: Tensor
    peer: int


class _Sent(NamedTuple):
    tensor: Tensor
    received: threading.Event


class Group:
    """A group as one of its ranks sees it. ``wires`` has what is sent between two ranks, for all of them.

    ``together`` makes its collectives.
    """

    def __init__(
        self,
        rank: int,
        wires: dict[tuple[int, int], "SimpleQueue[_Sent]"],
        together: InProcessGroup,
        seed: str,
    ) -> None:
        self.rank, self._wires, self._random = rank, wires, random.Random(seed)
        self.together = together
        self.set_timeout = bool
        self._stream: SimpleQueue[tuple[Callable[[], None], Work]] = SimpleQueue()
        self.num_started = self.num_done = self.num_found_over = 0
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._start([Message(True, *tensors, peer)])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._start([Message(False, *tensors, peer)])

    def allreduce(self, tensors: list[Tensor]) -> Work:
        return self.run(lambda: self.together.all_reduce(*tensors)())

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]]) -> Work:
        whole = torch.cat(inputs[0])
        return self.run(lambda: self.together.reduce_scatter(*outputs, whole)())

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Work:
        peers = [*enumerate(outputs[0])]
        received = [Message(False, part, peer) for peer, part in peers]
        return self._start([*(Message(True, *inputs, peer) for peer, _ in peers), *received])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor]) -> Work:
        sent = [Message(True, part, peer) for peer, part in enumerate(inputs)]
        return self._start([*sent, *(Message(False, part, peer) for peer, part in enumerate(outputs))])

    def _start(self, messages: Sequence[Message]) -> Work:
        return self.run(functools.partial(self._exchange, messages))

    def run(self, job: Callable[[], None]) -> Work:
        """Let the stream do a job behind those before it."""
        self.num_started += 1
        work = Work(self, self.num_started, self._random.randrange(3))
        self._stream.put((job, work))
        return work

    def abort(self) -> None:
        """Do nothing: threads that wait for a message are left behind."""

    def _run(self) -> None:
        while True:
            job, work = self._stream.get()
            time.sleep(self._random.random() * 3e-4)
            job()
            self.num_done += 1
            over = work.over
            del job, work  # which hold memory
            over.set()

    def _exchange(self, messages: Sequence[Message]) -> None:
        """What is sent and received as one has no order."""
        leaving = []
        for message in messages:
            if message.is_sent:
                sent = _Sent(message.tensor, threading.Event())
                self._wires[self.rank, message.peer].put(sent)
                leaving.append(sent)
        for message in messages:
            if not message.is_sent:
                arrived = self._wires[message.peer, self.rank].get()
                assert message.tensor.dtype is arrived.tensor.dtype
                assert message.tensor.numel() == arrived.tensor.numel()
                with torch.no_grad():
                    message.tensor.view(-1).copy_(arrived.tensor.view(-1))  # NCCL knows the count alone
                arrived.received.set()
        for sent in leaving:
            sent.received.wait()


class Options:
    """Those of an NCCL group."""

    def __init__(self, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=32)


class Distributed:
    """torch.distributed, as all ranks see it."""

    DistError = dist.DistError

    def __init__(self) -> None:
        self.ProcessGroupNCCL: Any = functools.partial(lambda *given: self.make_group(*given))
        self.ProcessGroupNCCL.Options = Options
        self._wires: dict[str, dict[tuple[int, int], SimpleQueue[_Sent]]] = {}
        self._collectives: dict[str, InProcessCollectives] = {}

    def PrefixStore(self, prefix: str, store: object) -> str:
        return prefix

    def make_group(self, store: str, rank: int, size: int, options: Options) -> Any:
        """The group of the ranks that give it the same store; ``rank`` is the number in it."""
        collectives = self._collectives.setdefault(store, InProcessCollectives(size, lambda: None))
        pairs = itertools.product(range(size), repeat=2)
        wires = self._wires.setdefault(store, {pair: SimpleQueue() for pair in pairs})
        return Group(rank, wires, InProcessGroup(collectives, rank), f"{store} {rank}")


class Emulated(DistributedTransport):
    """The transport of a rank whose GPU is emulated. If another one fails, the test is told by itself."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks, self.device, self._timeout = rank, num_ranks, torch.device("cpu"), PATIENCE
        self.star = Star(0, 1, PATIENCE)
        self._connections = NcclConnections(self.device, dist.HashStore(), rank, num_ranks, bool)

    def is_busy(self) -> bool:
        """Whether messages run on the device of the rank."""
        groups: Any = self._connections._unaborted  # type: ignore[attr-defined]
        return any(group.num_done < group.num_started for group in groups)


def run_ranks(num_ranks: int, run: Callable[[Emulated], T]) -> list[T]:
    """What ``run`` returns for each rank; all run at the same time, each with its transport."""
    ranks = [Emulated(rank, num_ranks) for rank in range(num_ranks)]
    found = [Future[T]() for _ in ranks]

    def run_one(transport: Emulated, result: "Future[T]") -> None:
        try:
            result.set_result(run(transport))
        except BaseException as error:
            result.set_exception(error)

    for each in zip(ranks, found, strict=True):
        threading.Thread(target=run_one, args=each, daemon=True).start()
    try:
        done, waiting = wait(found, PATIENCE, FIRST_EXCEPTION)
        for each in done:
            each.result()
        assert not waiting, "some ranks wait for each other"
        return [each.result() for each in found]
    finally:
        for rank in ranks:
            rank.star.close()
