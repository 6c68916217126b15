"""The steady state of mini-batches that follow each other: how fast they come out, and what is idle."""

from dataclasses import dataclass

import numpy as np

from pipec.ir import Op
from pipec.ir.columns import OP_CODE, Floats
from pipec.timeline.events import Timeline


@dataclass(frozen=True)
class Steady:
    """``seconds`` from one mini-batch to the next, in the timeline's unit, and the share that ranks idle."""

    seconds: float
    bubble_rate: float


def steady_state(timeline: Timeline) -> Steady | None:
    """What holds once the pipeline is full. None where steps end with a flush, or where it never is full.

    The last stage does the same for one mini-batch as for the one before, until the last one; the second half
    of its updates is therefore as far apart as those of a stream without end.
    """
    stream = timeline.ending.stream
    if stream is None:
        return None
    ends = _update_times(timeline, max(timeline.replicas, default=0))
    middle, filling = ends.size // 2, -(-len(timeline.replicas) // stream.microbatches)
    if middle < filling or ends.size - middle < 2:
        return None
    seconds = float(ends[-1] - ends[middle]) / (ends.size - 1 - middle)
    computes = timeline.computes
    busy = float((computes.ends - computes.starts).sum()) / ends.size
    return Steady(seconds, 1 - busy / (timeline.num_ranks * seconds) if seconds else 0.0)


def _update_times(timeline: Timeline, stage: int) -> Floats:
    instructions = timeline.columns.instructions
    updates = (instructions.ops == OP_CODE[Op.UPDATE]) & (instructions.stages == stage)
    return np.sort(timeline.columns.ends[updates])
