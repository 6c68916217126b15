"""When each instruction of a step ran, by the clock of its rank."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pipec.ir import Program

Stamps = list[int]
"""Three times for each instruction of a program, in order: when it began, when all that it waited for had
come, and when it ended. A collective has ended when whoever waited for it found it over. They are nanoseconds
since the epoch, so that the times of two hosts compare as well as the hosts' clocks agree.

They are times of the host. What a GPU still has to compute when an instruction ends is not in them.
"""


@dataclass(frozen=True)
class RecordedStep:
    """The programs of one step, and the stamps that each rank took while it ran them."""

    programs: Sequence[Program]
    stamps: dict[int, Stamps]


def epoch_offset() -> int:
    """The number to add to ``time.perf_counter_ns()`` to get nanoseconds since the epoch."""
    return time.time_ns() - time.perf_counter_ns()
