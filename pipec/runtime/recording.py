"""When each instruction of a step ran, as every rank saw it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pipec.ir import Program

Stamps = list[int]
"""Three times for each instruction of a program, in order: when it began, when all it waited for had come,
and when it ended. Nanoseconds since the epoch: those of different hosts compare as well as their clocks.

They are times of the host: what a GPU still had to compute when an instruction ended is not in them.
"""


@dataclass(frozen=True)
class RecordedStep:
    """The programs of one step, and the stamps that each rank took while it ran them."""

    programs: Sequence[Program]
    stamps: dict[int, Stamps]


def epoch_offset() -> int:
    """What added to ``time.perf_counter_ns()`` gives nanoseconds since the epoch."""
    return time.time_ns() - time.perf_counter_ns()
