"""Traces: the timelines of recorded steps, and the planned timeline to compare."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipec.errors import InputError
from pipec.ir import NO_SYNC, Op, Program, StepPart, SyncSpec
from pipec.ir.columns import with_shared_links
from pipec.programs.awaited_starts import awaited_starts
from pipec.programs.rank_memory import peak_in_flight
from pipec.timeline.events import Event, Timeline


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


def measured_timeline(
    programs: Sequence[Program], timestamps: Mapping[int, Sequence[int]], sync_spec: SyncSpec = NO_SYNC
) -> Timeline:
    """The timeline of a step from two timestamps per instruction, in ns: begun and ended.

    A message, a collective or a copy ends at the latest when the wait for it has ended, and no earlier end is
    known. A result, which is awaited after all computes, lasts as long as its send.
    """
    start = min(min(times) for times in timestamps.values())
    runs = {
        program.rank: np.array(timestamps[program.rank], np.int64).reshape(-1, 2) - start
        for program in programs
    }
    columns = with_shared_links(programs)
    for program, each in zip(programs, columns, strict=True):
        waits, starts = awaited_starts(each)
        runs[program.rank][starts, 1] = runs[program.rank][waits, 1]
    arrivals = {
        (instruction.link, instruction.microbatch, instruction.peer, program.rank): int(ended)
        for program in programs
        for instruction, (_, ended) in zip(program.instructions, runs[program.rank], strict=True)
        if instruction.op is Op.WAIT_RECV
    }
    events = []
    for program in programs:
        for instruction, (begun, ended) in zip(
            program.instructions, runs[program.rank].tolist(), strict=True
        ):
            if not instruction.op.traits.timed:
                continue
            if instruction.link and not instruction.link.payload.is_result:
                key = instruction.link, instruction.microbatch, program.rank, instruction.peer
                ended = max(ended, arrivals.get(key, ended))
            events.append(Event(program.rank, instruction, 1e-9 * begun, 1e-9 * ended))
    return Timeline(tuple(events), tuple(map(peak_in_flight, programs)), sync_spec=sync_spec)
