"""Traces: the timelines of recorded steps, and the planned timeline to compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipec.errors import InputError
from pipec.ir import NO_SYNC, Program, StepPart, SyncSpec
from pipec.ir.columns import with_shared_links
from pipec.programs.rank_memory import peak_in_flight
from pipec.timeline.events import Events, Timeline
from pipec.timeline.step_events import StepEvents


@dataclass
class Trace:
    """Timelines of the recorded steps, in order, and the planned timeline of the same step.

    A timeline may be that of a part of a step, by its ``sync_spec``. ``numbers`` counts the steps from the
    first of the training, and ``notes`` has what was special about a step, recorded or not, by its number:
    whether it was skipped or compiled. ``simulated`` is the timeline of a whole step of one plan, and
    ``of_other_plans`` are the positions of steps of others, such as of batches of another size.
    """

    simulated: Timeline | None = None
    steps: list[Timeline] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    notes: dict[int, str] = field(default_factory=dict)
    of_other_plans: set[int] = field(default_factory=set)

    @property
    def parts(self) -> list[StepPart]:
        """The parts of a step that were recorded, the whole step first."""
        found = {step.sync_spec.part for step in self.steps}
        return [part for part in StepPart if part in found]

    def median_step(self, part: StepPart | None = None) -> Timeline:
        """The step of median makespan, of ``part`` or of the first of ``parts``; of the plan if there is one.

        Raises InputError if there is none.
        """
        if not self.steps:
            raise InputError("nothing was recorded; call step() inside `with pipe.trace() as trace:`")
        part = part or self.parts[0]
        own = [k for k, step in enumerate(self.steps) if step.sync_spec.part is part]
        typical = [self.steps[k] for k in own if k not in self.of_other_plans] or [self.steps[k] for k in own]
        return sorted(typical, key=lambda step: step.makespan)[(len(typical) - 1) // 2]

    def timelines(self) -> dict[str, Timeline]:
        """The typical measured step, and if it is a whole one the planned one, by name."""
        measured = self.median_step()
        is_whole = measured.sync_spec.part is StepPart.WHOLE
        planned = {"planned": self.simulated} if self.simulated and is_whole else {}
        return {**planned, "measured": measured}


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
    events = Events.at(step.ranks, step.events, starts, ends)
    peaks = tuple(map(peak_in_flight, programs))
    return Timeline(events, peaks, sync_spec=sync_spec, waits=step.waits(begun, ended))
