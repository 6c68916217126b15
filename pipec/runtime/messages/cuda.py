"""What GPUs ask of threads: a current device, the right streams, and copies beside what is computed."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from pipec.runtime.messages.connections import MAX_IN_TRANSIT

T = TypeVar("T")


@contextlib.contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Make ``device`` the one that CUDA calls without a device are for, on this thread, inside a ``with``.

    Such calls are Triton kernels, extensions, and ``torch.cuda.synchronize()``.
    """
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        yield


class CallerStreams:
    """The streams of ``devices`` on which the thread that makes this computes, for others to compute on.

    What a script does before a step, and after it, is then in order with the step, on whatever stream it is.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        gpus = dict.fromkeys(device for device in devices if device.type == "cuda")
        self._streams = [torch.cuda.current_stream(device) for device in gpus]

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Let this thread compute on them inside a ``with``."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield


class PeerToPeerCopies:
    """Copies from one GPU of this process to another, on streams of their own.

    A copy begins when its values are made, and neither GPU computes later for it. At most ``MAX_IN_TRANSIT``
    are in transit: until they are over, the memory of both ends is held, and the host may be far ahead.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        self._leaving, self._arriving = torch.cuda.Stream(source), torch.cuda.Stream(target)
        self._in_transit: deque[torch.cuda.Event] = deque()

    def start(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Copy what the current stream of the source makes; returns what hands the copies to the target's."""
        if len(self._in_transit) == MAX_IN_TRANSIT:
            self._in_transit.popleft().synchronize()
        self._leaving.wait_stream(torch.cuda.current_stream(self._source))
        with torch.cuda.stream(self._leaving), torch.cuda.stream(self._arriving):
            copies = [tensor.to(self._target, non_blocking=True) for tensor in tensors]
            over = self._arriving.record_event()
        for tensor in tensors:
            tensor.record_stream(self._leaving)
        self._in_transit.append(over)

        def take() -> Sequence[Tensor]:
            reader = torch.cuda.current_stream(self._target)
            reader.wait_event(over)
            for copy in copies:
                copy.record_stream(reader)
            return copies

        return take


class CopyStream:
    """A stream of a GPU for copies in one direction, beside what is computed."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, copy: Callable[[], None]) -> Callable[[], None]:
        """Copy behind what was launched until now; returns what lets what is launched next wait for it.

        The caller holds the memory of the device until then.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
            over = self._stream.record_event()

        def wait() -> None:
            reader = torch.cuda.current_stream(self._device)
            reader.wait_event(over)

        return wait

    def finish(self) -> None:
        """Let what is launched next wait for all copies."""
        follower = torch.cuda.current_stream(self._device)
        follower.wait_stream(self._stream)


class CudaGraphRecorder:
    """Records CUDA graphs on a GPU, which share a pool of memory: no two of them may run at a time.

    A first call on the stream that records lets libraries load what they need, and take their workspaces.
    Meanwhile other threads of the process may use CUDA. (PyTorch documentation, CUDA semantics: CUDA Graphs.)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def warm_up(self, call: Callable[[], object]) -> None:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            call()
        current.wait_stream(self._stream)

    def record(
        self, call: Callable[[], T], generators: Sequence[torch.Generator]
    ) -> tuple[T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with (
            torch.cuda.stream(self._stream),  # which torch leaves only if it has recorded
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
        ):
            made = call()
        return made, graph.replay


def pinned_copy(tensor: Tensor) -> Tensor:
    """A copy on the host in pinned memory, which GPUs read while the host goes on.

    That of the script might be pinned as well, and be filled with the next batch meanwhile.
    """
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
