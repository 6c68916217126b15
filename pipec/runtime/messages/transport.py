"""The protocol of transports, and the transport between ranks of one process."""

import functools
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from pipec.errors import TransportError
from pipec.ir import Instruction, Sizes
from pipec.runtime.messages.collective_group import CollectiveGroup, InProcessCollectives, InProcessGroup
from pipec.runtime.messages.cuda import PeerToPeerCopies, on_callers_streams
from pipec.runtime.processes.worker import Worker

T = TypeVar("T")

Send = Callable[[Sequence[Tensor], Sizes], None]
"""Starts to send the values of a link, in order, without waiting. They must not change afterwards.

Their shapes are evaluated with the sizes.
"""


class Receiver(Protocol):
    """One receive instruction, bound to its buffers."""

    def post(self, sizes: Sizes) -> None:
        """Prepare to receive values with shapes evaluated with ``sizes``. Does not wait."""

    def wait(self) -> Sequence[Tensor]:
        """Wait until the values have arrived, and return them on this rank's device.

        Raises:
            TransportError: they will not arrive.
        """


class Transport(Protocol):
    """One rank's end. Messages with the same tag between the same ranks arrive in the order they were sent.

    So the k-th message is for the k-th receive that is posted, whichever receive is awaited first. ``tag`` is
    the position of the instruction's link in the plan, which is the same on every rank.
    """

    def sender(self, instruction: Instruction, tag: int) -> Send: ...

    def receiver(self, instruction: Instruction, tag: int) -> Receiver: ...

    def group(self, ranks: Sequence[int]) -> CollectiveGroup:
        """The group of these ranks, which include this one, for collectives."""

    def finish(self) -> None:
        """Wait until all messages of this step are sent. Raises TransportError."""

    def check(self) -> None:
        """Raise TransportError if another rank's failure has aborted messages that this one waits for."""

    def fail(self, error: BaseException) -> None:
        """Tell every other rank that this one has stopped, and why."""


class InProcessTransport:
    """Runs every rank in this process, each on a worker thread, and passes tensors by reference.

    Rank r runs on ``devices[r]``, and a GPU's ranks on the stream of the thread that calls ``run``. The CPU
    ranks share the intra-op threads of the thread that made this object.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self._has_gpus = any(device.type == "cuda" for device in devices)
        self._mailboxes: dict[tuple[int, int, int], _Mailbox] = {}
        self._copies: dict[tuple[torch.device, torch.device], PeerToPeerCopies] = {}
        self._in_process_collectives: dict[tuple[int, ...], InProcessCollectives] = {}
        self._failure: BaseException | None = None
        self._failing = threading.Lock()
        self._stopped = threading.Event()
        self._workers = [Worker(f"pipec rank {rank}") for rank in range(len(self.devices))]
        self._set_up_workers()

    def endpoint(self, rank: int) -> Transport:
        """The transport of one rank's interpreter."""
        return _Endpoint(self, rank)

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run one job for each rank, on the rank's thread, and return their results.

        The first error of any rank stops the others at their next send or receive, and is raised once all
        have stopped. The transport is then ready for another run.
        """
        done: SimpleQueue[tuple[int, T | None]] = SimpleQueue()
        results: dict[int, T | None] = {}
        try:
            if self._has_gpus:
                jobs = [on_callers_streams(self.devices, job) for job in jobs]
            for rank, (worker, job) in enumerate(zip(self._workers, jobs, strict=True)):
                worker.submit(functools.partial(self._run_job, rank, job, done))
            while len(results) < len(jobs):
                rank, result = done.get()
                results[rank] = result
        except BaseException as interrupt:  # such as Ctrl-C
            self.fail(interrupt)
        if self._failure is not None:
            raise self._recover()
        return [cast(T, results[rank]) for rank in range(len(jobs))]

    def fail(self, error: BaseException) -> None:
        """Stop every rank; the first error is the one that ``run`` raises."""
        with self._failing:
            self._failure = self._failure or error
        self._stopped.set()
        self._for_all_waits(lambda each: each.wake())

    def mailbox(self, tag: int, source: int, target: int) -> "_Mailbox":
        key = tag, source, target
        if key not in self._mailboxes:
            device_copy = self._device_copy(self.devices[source], self.devices[target])
            self._mailboxes[key] = _Mailbox(device_copy, self.check_running)
        return self._mailboxes[key]

    def _device_copy(self, source: torch.device, target: torch.device) -> "_DeviceCopy":
        """The copy of tensors from one device to another. Between CPU and GPU the reader copies."""
        if source == target:
            return lambda tensors: lambda: tensors
        if source.type == target.type == "cuda":
            if (source, target) not in self._copies:
                self._copies[source, target] = PeerToPeerCopies(source, target)
            return self._copies[source, target].start
        return lambda tensors: lambda: [tensor.to(target) for tensor in tensors]

    def group(self, ranks: Sequence[int], rank: int) -> CollectiveGroup:
        """The collectives of these ranks, for one of them."""
        in_process_collectives = self._in_process_collectives.setdefault(
            tuple(ranks), InProcessCollectives(len(ranks), self.check_running)
        )
        return InProcessGroup(in_process_collectives, list(ranks).index(rank))

    def check_running(self) -> None:
        if self._stopped.is_set():
            raise TransportError("another rank of this process failed")

    def _run_job(self, rank: int, job: Callable[[], T], done: "SimpleQueue[tuple[int, T | None]]") -> None:
        result = None
        try:
            result = job()
        except BaseException as error:
            self.fail(error)
        done.put((rank, result))

    def _recover(self) -> BaseException:
        """The failure, once every worker is idle and ready for another run."""
        for worker in self._workers:
            worker.wait_until_idle()
        self._for_all_waits(lambda each: each.clear())
        self._stopped.clear()
        failure, self._failure = self._failure, None
        assert failure is not None
        return failure

    def _for_all_waits(self, do: "Callable[[_Mailbox | InProcessCollectives], None]") -> None:
        for mailbox in self._mailboxes.values():
            do(mailbox)
        for in_process_collectives in self._in_process_collectives.values():
            do(in_process_collectives)

    def _set_up_workers(self) -> None:
        """Give each worker its share of the intra-op threads, and restore the caller's number.

        torch has a number for each thread, but setting it also sets the default of threads started later.
        """
        num_threads = torch.get_num_threads()
        num_cpu_ranks = sum(device.type == "cpu" for device in self.devices)
        share = max(1, num_threads // max(1, num_cpu_ranks))
        self.run([functools.partial(_set_up_worker, device, share) for device in self.devices])
        torch.set_num_threads(num_threads)


class _Endpoint:
    def __init__(self, ranks: InProcessTransport, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    def sender(self, instruction: Instruction, tag: int) -> Send:
        return self._ranks.mailbox(tag, self._rank, instruction.peer).send

    def receiver(self, instruction: Instruction, tag: int) -> Receiver:
        return _Receiver(self._ranks.mailbox(tag, instruction.peer, self._rank))

    def group(self, ranks: Sequence[int]) -> CollectiveGroup:
        return self._ranks.group(ranks, self._rank)

    def finish(self) -> None:
        """Do nothing: a message left when it was put into its mailbox."""

    def check(self) -> None:
        """Do nothing: messages are never aborted while a compute reads them."""

    def fail(self, error: BaseException) -> None:
        self._ranks.fail(error)


_Receive = Callable[[], Sequence[Tensor]]
_DeviceCopy = Callable[[Sequence[Tensor]], _Receive]


class _Mailbox:
    """The messages of one link for one rank: the k-th message is for the k-th receive that is posted.

    The sender calls ``device_copy``, and the reader calls the function that it returns. ``check_running``
    raises if the ranks have stopped.
    """

    def __init__(self, device_copy: _DeviceCopy, check_running: Callable[[], None]) -> None:
        self._device_copy, self._check_running = device_copy, check_running
        self._places: dict[int, SimpleQueue[_Receive]] = {}
        self.num_posted = self._num_sent = 0

    def send(self, tensors: Sequence[Tensor], sizes: Sizes) -> None:
        self._check_running()
        self._places.setdefault(self._num_sent, SimpleQueue()).put(self._device_copy(tensors))
        self._num_sent += 1

    def wait(self, number: int) -> Sequence[Tensor]:
        """Wait for a message. Others may be awaited later, though they were sent earlier."""
        # before the check: from then on ``wake`` finds it
        place = self._places.setdefault(number, SimpleQueue())
        self._check_running()
        received = place.get()
        self._check_running()
        del self._places[number]
        return received()

    def wake(self) -> None:
        """Wake a waiting reader, so that it notices that the ranks have stopped."""
        for place in list(self._places.values()):
            place.put(tuple)

    def clear(self) -> None:
        self._places.clear()
        self.num_posted = self._num_sent = 0


class _Receiver:
    """A receive instruction: it awaits the message that it has posted last, which owns its memory."""

    def __init__(self, mailbox: _Mailbox) -> None:
        self._mailbox, self._number = mailbox, 0

    def post(self, sizes: Sizes) -> None:
        self._number = self._mailbox.num_posted
        self._mailbox.num_posted += 1

    def wait(self) -> Sequence[Tensor]:
        return self._mailbox.wait(self._number)


def _set_up_worker(device: torch.device, num_threads: int) -> None:
    if device.type == "cpu":
        torch.get_num_threads()  # the first call in a thread sets the process-wide number: call it before
        torch.set_num_threads(num_threads)
