"""When each instruction of a step ran, by the clock of its rank."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipec.ir import Program, StepPart

Timestamps = list[int]
"""Two times for each instruction of a program, in order: when it began and when it ended.

They are nanoseconds since the epoch, so that the times of two hosts compare as well as their clocks agree.

Those of a GPU's rank are times of the GPU: when it came to what the instruction has launched.
"""


@dataclass(frozen=True)
class RecordedStep:
    """The programs of one step, or of a part of it, and the timestamps that each rank took meanwhile."""

    programs: Sequence[Program]
    timestamps: dict[int, Timestamps]
    part: StepPart = StepPart.WHOLE


Moment = Any
"""A moment that a clock has noted, in its own form."""


class Clock:
    """Notes moments of a step that is recorded, by the clock of the host."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Note the moments inside a ``with``."""
        self._offset = time.time_ns() - time.perf_counter_ns()
        yield

    def now(self) -> Moment:
        return time.perf_counter_ns()

    def times(self, marks: Sequence[Moment]) -> Timestamps:
        """Moments of what is recorded, in nanoseconds since the epoch."""
        return [mark + self._offset for mark in marks]


class CudaClock(Clock):
    """Notes, by CUDA events, when the current stream reaches the next launch.

    An event costs the host some microseconds, so that there are none unless a step is recorded.
    """

    _first: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self._first = self._event()
        self._first.synchronize()
        self._began = time.time_ns()
        try:
            yield
        finally:
            self._first = None

    def now(self) -> Moment:
        return None if self._first is None else self._event()

    def times(self, marks: Sequence[Moment]) -> Timestamps:
        assert self._first is not None, "events are compared while they are recorded"
        for mark in marks:
            mark.synchronize()
        return [self._began + round(1e6 * self._first.elapsed_time(mark)) for mark in marks]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def clock_of(device: torch.device) -> Clock:
    """The clock of a rank on a device."""
    return CudaClock() if device.type == "cuda" else Clock()
