"""CUDA helpers for threads: the current device, streams and concurrent copies."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from pipec.runtime.messages.connections import MAX_IN_TRANSIT

T = TypeVar("T")

Wait = Callable[[], None]


@contextlib.contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Make ``device`` this thread's current CUDA device inside a ``with``.

    It is used by Triton kernels, extensions, and ``torch.cuda.synchronize()``. A new thread has no context
    of CUDA, not even that of the device which is current anyway, and cuBLAS warns of that.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):  # does nothing if it is current
        torch.cuda.set_device(device)
        yield


def on_callers_streams(devices: Iterable[torch.device], job: Callable[[], T]) -> Callable[[], T]:
    """The job for another thread, which then computes on the current streams of this one.

    So a step is ordered with the script's work before and after it, whatever stream the script uses.
    """
    gpus = dict.fromkeys(device for device in devices if device.type == "cuda")
    streams = [torch.cuda.current_stream(device) for device in gpus]

    def follow() -> T:
        with contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            return job()

    return follow if streams else job


class PeerToPeerCopies:
    """Copies from one GPU of this process to another, on separate streams.

    A copy begins when its values are computed, and delays neither GPU. At most ``MAX_IN_TRANSIT`` are in
    transit: until they end, the memory of both ends is in use, and the host may be far ahead.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        self._leaving, self._arriving = torch.cuda.Stream(source), torch.cuda.Stream(target)
        self._in_transit: deque[torch.cuda.Event] = deque()

    def start(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Start to copy tensors; returns a function that makes the copies usable on the target's stream."""
        if len(self._in_transit) == MAX_IN_TRANSIT:
            self._in_transit.popleft().synchronize()
        self._leaving.wait_stream(torch.cuda.current_stream(self._source))
        with torch.cuda.stream(self._leaving), torch.cuda.stream(self._arriving):
            copies = [tensor.to(self._target, non_blocking=True) for tensor in tensors]
            done = self._arriving.record_event()
        for tensor in tensors:
            tensor.record_stream(self._leaving)
        self._in_transit.append(done)

        def take() -> Sequence[Tensor]:
            reader = torch.cuda.current_stream(self._target)
            reader.wait_event(done)
            for copy in copies:
                copy.record_stream(reader)
            return copies

        return take


class PastLaunches:
    """Launches work on a GPU as if it had been launched earlier, so that it waits for nothing since then.

    On a CPU there are no launches to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def here(self) -> contextlib.AbstractContextManager[None]:
        """A context that waits only for what the current stream has been given so far."""
        if self._stream is None:
            return contextlib.nullcontext()
        current = torch.cuda.current_stream(self._device)
        return self._after(self._stream, current.record_event())

    @contextlib.contextmanager
    def _after(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> Iterator[None]:
        stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield


class CopyStream:
    """A stream of a GPU for copies in one direction, concurrent with computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, copy: Wait, host_reads: bool = False) -> Wait:
        """Copy after all work launched so far; returns a function that makes later work wait for the copy.

        If the ``host_reads`` what is copied, it waits itself. Until then, the caller keeps the device memory
        alive.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
            done = self._stream.record_event()

        def wait() -> None:
            reader = torch.cuda.current_stream(self._device)
            reader.wait_event(done)

        return done.synchronize if host_reads else wait

    def synchronize(self) -> None:
        """Wait for all copies."""
        self._stream.synchronize()

    def finish(self) -> None:
        """Make later work wait for all copies."""
        follower = torch.cuda.current_stream(self._device)
        follower.wait_stream(self._stream)


def pinned_copy(tensor: Tensor) -> Tensor:
    """A copy in pinned host memory, from which GPUs copy asynchronously.

    Even a pinned tensor is copied: the script might overwrite it with the next batch meanwhile.
    """
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. The host waits for a copy that it reads itself, but not for one to a GPU."""
    return tensor.to(device, non_blocking=device.type == "cuda")
