"""Traces: the timelines of recorded steps, and the planned timeline to compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipec.errors import InputError
from pipec.ir import NO_SYNC, Program, SyncSpec
from pipec.ir.columns import with_shared_links
from pipec.programs.rank_memory import peak_in_flight
from pipec.timeline.events import Events, Timeline
from pipec.timeline.step_events import StepEvents


@dataclass
class Trace:
    """Timelines of the recorded steps, in order, and the planned timeline of the same step.

    ``numbers`` counts the steps from the first of the training, and ``notes`` has what was special about a
    step: whether it was skipped or compiled.
    """

    simulated: Timeline | None = None
    steps: list[Timeline] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def median_step(self) -> Timeline:
        """The step of median makespan. Raises InputError if there is none."""
        if not self.steps:
            raise InputError("nothing was recorded; call step() inside `with pipe.trace() as trace:`")
        return sorted(self.steps, key=lambda step: step.makespan)[(len(self.steps) - 1) // 2]

    def timelines(self) -> dict[str, Timeline]:
        """The planned step and the typical measured one, by name, to be drawn on one axis."""
        planned = {"planned": self.simulated} if self.simulated else {}
        return {**planned, "measured": self.median_step()}


_CALL_SECONDS = 5e-5
"""A wait that takes no longer than this found what it is for there: this is the time of the call."""


def measured_timeline(
    programs: Sequence[Program], timestamps: Mapping[int, Sequence[int]], sync_spec: SyncSpec = NO_SYNC
) -> Timeline:
    """The timeline of a step from two timestamps per instruction, in ns: begun and ended.

    A message, a collective or a copy ends at the latest when the wait for it has ended, and no earlier end is
    known. A result, which is awaited after all computes, lasts as long as its send.
    """
    start = min(min(times) for times in timestamps.values())
    columns = with_shared_links(programs)
    step = StepEvents(columns)
    runs = [1e-9 * (np.array(timestamps[x.rank], np.int64).reshape(-1, 2) - start) for x in programs]
    starts, ends = np.concatenate([run[each.is_timed] for run, each in zip(runs, columns, strict=True)]).T
    sites = np.split(step.wait_sites, np.searchsorted(step.wait_ranks, range(1, len(programs))))
    begun, ended = np.concatenate([run[own] for run, own in zip(runs, sites, strict=True)]).T
    begun = np.where(ended - begun <= _CALL_SECONDS, ended, begun)
    is_result = np.array([*(link.payload.is_result for link in step.events.links), False])
    shown = np.flatnonzero(~is_result[step.events.link_numbers[step.awaited]])
    np.maximum.at(ends, step.awaited[shown], ended[shown])
    events = Events(step.ranks, step.events, starts, ends)
    peaks = tuple(map(peak_in_flight, programs))
    return Timeline(events, peaks, sync_spec=sync_spec, waits=step.waits(begun, ended))
