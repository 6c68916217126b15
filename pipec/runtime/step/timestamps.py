"""When each instruction of a step ran, by the clock of its rank."""

import time
from collections.abc import Sequence
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

    def begin(self) -> None:
        """Begin to note moments."""
        self._offset = time.time_ns() - time.perf_counter_ns()

    def now(self) -> Moment:
        return time.perf_counter_ns()

    def times(self, marks: Sequence[Moment]) -> Timestamps:
        """Moments since the clock has begun, in nanoseconds since the epoch."""
        return [mark + self._offset for mark in marks]


class CudaClock(Clock):
    """Notes, by CUDA events, when the current stream reaches the next launch."""

    def begin(self) -> None:
        self._first = self.now()
        self._first.synchronize()
        self._began = time.time_ns()

    def times(self, marks: Sequence[Moment]) -> Timestamps:
        for mark in marks:
            mark.synchronize()
        return [self._began + round(1e6 * self._first.elapsed_time(mark)) for mark in marks]

    def now(self) -> Moment:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def clock_of(device: torch.device) -> Clock:
    """The clock of a rank on a device."""
    return CudaClock() if device.type == "cuda" else Clock()
