"""What is asked of CUDA's streams, by a stub of ``torch.cuda`` that needs no GPU."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import pipec
from pipec.runtime import random_operators
from pipec.runtime.messages.connections import MAX_IN_TRANSIT
from pipec.runtime.messages.cuda import PeerToPeerCopies, on_callers_streams
from pipec.runtime.messages.transport import InProcessTransport
from pipec.runtime.random_operators import call_with_generator
from pipec.runtime.stages import bound_stage
from pipec.runtime.step import execution
from pipec.runtime.step.timestamps import CudaClock

A, B, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


class Event:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self.name}")


class Stream:
    """Writes down what is asked of it, and by which stream."""

    def __init__(self, device: torch.device, name: str, log: list[str]) -> None:
        self.device, self.name, self._log = device, name, log
        self._num_events = 0

    def wait_stream(self, other: "Stream") -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self._log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self._num_events += 1
        return Event(f"{self.name} {self._num_events}", self._log)


class Cuda:
    """``torch.cuda``: each thread has a current stream on every device, the default one at first."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._here = threading.local()
        self._defaults: dict[torch.device, Stream] = {}
        self._made = {A: iter(["leaving", "side of A"]), B: iter(["arriving", "side of B"])}

    def Stream(self, device: torch.device) -> Stream:
        return Stream(device, next(self._made[device]), self.log)

    def current_stream(self, device: torch.device) -> Stream:
        default = self._defaults.setdefault(device, Stream(device, f"default of {device}", self.log))
        found: Stream = vars(self._here).get(str(device), default)
        return found

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream(stream.device)
        vars(self._here)[str(stream.device)] = stream
        yield
        vars(self._here)[str(stream.device)] = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stub = Cuda()
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(stub, name))
    return stub


def streams_of(cuda: Cuda) -> Callable[[], list[str]]:
    return lambda: [cuda.current_stream(device).name for device in (A, B)]


def test_ranks_compute_on_the_streams_of_their_caller(cuda: Cuda) -> None:
    """Else a step would not wait for what the script has launched, nor the script for the step."""
    ranks, defaults = InProcessTransport([A, A, B, CPU]), ["default of cuda:0", "default of cuda:1"]
    with cuda.stream(Stream(A, "side of A", cuda.log)), cuda.stream(Stream(B, "side of B", cuda.log)):
        assert ranks.run([streams_of(cuda)] * 4) == [["side of A", "side of B"]] * 4
        later = on_callers_streams(ranks.devices, streams_of(cuda))
    assert ranks.run([streams_of(cuda)] * 4) == [defaults] * 4
    assert later() == ["side of A", "side of B"], "a stream of batches stays on that on which it began"


class Values:
    """A tensor whose copies are written down."""

    def __init__(self, cuda: Cuda, name: str) -> None:
        self._cuda, self._name = cuda, name

    def to(self, device: torch.device, non_blocking: bool) -> "Values":
        assert non_blocking
        by = [self._cuda.current_stream(each).name for each in (A, B)]
        self._cuda.log.append(f"{self._name} is copied by {by[0]} to {by[1]}")
        return Values(self._cuda, f"copy of {self._name}")

    def record_stream(self, stream: Stream) -> None:
        self._cuda.log.append(f"{self._name} is kept for {stream.name}")


def test_copies_between_gpus_run_beside_what_both_compute(cuda: Cuda) -> None:
    """Ranks share the copies of a direction: streams are few, and what is under way counts together."""
    ranks = InProcessTransport([A, B])
    x: Any = Values(cuda, "x")
    for tag in (0, 1):
        mailbox = ranks.mailbox(tag, 0, 1)
        mailbox.send([x], {})
        assert cuda.log == [
            "leaving waits for default of cuda:0",
            "x is copied by leaving to arriving",
            "x is kept for leaving",
        ]
        cuda.log.clear()
        mailbox.wait(0)
        assert cuda.log == [
            f"default of cuda:1 waits for arriving {tag + 1}",
            "copy of x is kept for default of cuda:1",
        ]
        cuda.log.clear()


def test_a_host_that_runs_ahead_of_copies_waits(cuda: Cuda) -> None:
    copies = PeerToPeerCopies(A, B)
    for _ in range(MAX_IN_TRANSIT + 2):
        copies.start([])
    waits = [line for line in cuda.log if line.startswith("host")]
    assert waits == ["host waits for arriving 1", "host waits for arriving 2"]


def test_what_gpus_read_of_a_batch_is_staged_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their copies wait for the GPU, or read what the script has filled with the next batch.

    Labels are counted where they are staged: a copy of the script's own to the GPU would wait for it.
    """
    staged, counted = list[Tensor](), list[Tensor]()

    def pinned_copy(tensor: Tensor) -> Tensor:
        staged.append(tensor.clone())
        return staged[-1]

    def on_device(tensor: Tensor, device: torch.device) -> Tensor:
        counted.append(tensor)
        return tensor

    monkeypatch.setattr(execution, "pinned_copy", pinned_copy)
    monkeypatch.setattr(bound_stage, "on_device", on_device)
    model, loss_fn = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), nn.CrossEntropyLoss(ignore_index=0)
    pipe = pipec.compile(model, ["cpu"] * 2, microbatches=4, loss_fn=loss_fn)
    x, y = torch.ones(8, 4), torch.arange(8) % 3
    pipe.step(x, target=y)
    assert staged == []
    counted.clear()
    (linked,) = pipe._executions._linked.values()
    linked._read_by_gpus = linked._interpreters[1].names_read  # as if that rank had a GPU
    pipe.step(x, target=y)
    (labels,) = staged
    assert torch.equal(labels, y)
    assert {tensor.data_ptr() for tensor in counted} == {labels.data_ptr()}


# times


class TimingEvent:
    """An event of a GPU that the host is ahead of. ``now`` is when it is done with all launches, in ms."""

    now = 7000.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self._time, self._is_over = TimingEvent.now, False

    def synchronize(self) -> None:
        self._is_over = True

    def elapsed_time(self, other: "TimingEvent") -> float:
        assert self._is_over
        assert other._is_over, "an event that has not come yet has no time"
        return other._time - self._time


def test_recorded_times_are_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes microseconds to launch what takes the GPU milliseconds."""
    monkeypatch.setattr(torch.cuda, "Event", TimingEvent)
    clock, began, marks = CudaClock(), time.time_ns(), list[Any]()
    clock.begin()
    for milliseconds in (0, 3, 0, 2):
        TimingEvent.now += milliseconds
        marks.append(clock.now())
    stamps = clock.times(marks)
    assert [round((stamp - stamps[0]) / 1e6) for stamp in stamps] == [0, 3, 3, 5]
    assert began <= stamps[0] <= time.time_ns()


# random numbers


def test_an_operator_without_a_generator_draws_from_the_very_state_of_its_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Default:
        state: object = "its own"

        def graphsafe_get_state(self) -> object:
            return self.state

        def graphsafe_set_state(self, state: object) -> None:
            self.state = state

    default, generator = Default(), cast(Any, SimpleNamespace(device=torch.device("cuda", 1)))
    monkeypatch.setattr(torch.cuda, "default_generators", (None, default))
    assert call_with_generator(generator, lambda: default.state) is generator
    assert default.state == "its own"


class _Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dropout_on_a_gpu_is_one_kernel_under_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced on fakes: there it draws from the default generator of the device."""
    generator, used = SimpleNamespace(device=A), list[object]()

    @contextlib.contextmanager
    def as_default(own: object) -> Iterator[None]:
        used.append(own)
        yield

    monkeypatch.setattr(random_operators, "_as_default", as_default)
    with FakeTensorMode():
        x = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
        with _Launches() as launches:
            output, mask = random_operators.dropout(x, 0.1, cast(Any, generator))
    assert launches.found == ["aten.native_dropout.default"]
    assert used == [generator]
    assert (output.dtype, mask.dtype, output.shape) == (torch.bfloat16, torch.bool, mask.shape)
