"""The steady state of an asynchronous schedule: the time of a mini-batch, and the idle time."""

from dataclasses import dataclass

import numpy as np

from pipec.ir import Op
from pipec.ir.columns import OP_CODE, Floats
from pipec.ir.stream import window
from pipec.timeline.events import Timeline


@dataclass(frozen=True)
class SteadyState:
    """The time from one mini-batch to the next, in the timeline's unit, and the fraction that ranks idle."""

    batch_interval: float
    bubble_rate: float


def steady_state(timeline: Timeline) -> SteadyState | None:
    """The steady state of a timeline; None if the schedule is synchronous, or the pipeline is never full.

    The last stage repeats its computes with a period, until the last mini-batch; so the intervals of the
    second half of its forwards are those of an endless stream.
    """
    stream = timeline.sync_spec.stream
    replicas = [len(timeline.replicas[stage]) for stage in sorted(timeline.replicas)]
    if stream is None or not replicas:
        return None
    ends = _forward_ends(timeline, len(replicas) - 1)
    middle, turn = ends.size // 2, stream.period(replicas) // replicas[-1]
    whole = (ends.size - 1 - middle) // turn * turn
    if middle * replicas[-1] < replicas[0] * window(0, replicas) or not whole:
        return None
    num_batches = whole * replicas[-1] / stream.microbatches
    seconds = float(ends[middle + whole] - ends[middle]) / num_batches
    computes = timeline.computes
    in_all = np.unique(computes.instructions.microbatches).size / stream.microbatches
    busy = float((computes.ends - computes.starts).sum()) / in_all
    return SteadyState(seconds, 1 - busy / (timeline.num_ranks * seconds) if seconds else 0.0)


def _forward_ends(timeline: Timeline, stage: int) -> Floats:
    """The ends of the forwards of the first replica of a stage."""
    instructions, first = timeline.columns.instructions, timeline.replicas[stage][0]
    forwards = (instructions.ops == OP_CODE[Op.FORWARD]) & (timeline.columns.ranks == first)
    found: Floats = timeline.columns.ends[forwards]
    return found
