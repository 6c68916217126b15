"""Traces: the timelines of recorded steps, and the planned timeline to compare."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipec.errors import InputError
from pipec.ir import NO_SYNC, Instruction, Op, OpKind, Phase, Program, SyncSpec
from pipec.programs.rank_memory import peak_in_flight
from pipec.timeline.events import Event, Timeline


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


def measured_timeline(
    programs: Sequence[Program], timestamps: Mapping[int, Sequence[int]], sync_spec: SyncSpec = NO_SYNC
) -> Timeline:
    """The timeline of a step from three timestamps per instruction, in ns: begun, inputs arrived, ended.

    A compute, an update or a collective lasts from the arrival of its inputs; a collective until its rank
    observed its end. The arrival of a message is only known when its reader has it, so it lasts until then;
    a message that is read after the program lasts as long as its send.
    """
    start = min(min(times) for times in timestamps.values())
    runs = {
        program.rank: [
            _Run(*(1e-9 * (time - start) for time in times)) for times in _triples(timestamps[program.rank])
        ]
        for program in programs
    }
    arrivals = {
        (instruction.stage, instruction.microbatch, instruction.op.phase): run.arrived
        for program in programs
        for instruction, run in zip(program.instructions, runs[program.rank], strict=True)
        if instruction.segment <= 0
    }
    events = [
        event
        for program in programs
        for instruction, run in zip(program.instructions, runs[program.rank], strict=True)
        for event in _events(program.rank, instruction, run, arrivals)
    ]
    return Timeline(tuple(events), tuple(map(peak_in_flight, programs)), sync_spec=sync_spec)


@dataclass(frozen=True, slots=True)
class _Run:
    """Seconds since the first instruction of the step began."""

    begun: float
    arrived: float
    ended: float


def _triples(timestamps: Sequence[int]) -> Iterator[Sequence[int]]:
    return (timestamps[at : at + 3] for at in range(0, len(timestamps), 3))


def _events(
    rank: int, instruction: Instruction, run: _Run, arrivals: Mapping[tuple[int, int, Phase | None], float]
) -> Iterator[Event]:
    kind = instruction.op.traits.kind
    if kind in (OpKind.COMPUTE, OpKind.UPDATE, OpKind.COLLECTIVE, OpKind.COPY):
        yield Event(rank, instruction, run.arrived, run.ended)
    elif instruction.op is Op.SEND and (link := instruction.link):
        readers = [(link.target, instruction.microbatch, phase) for phase in link.payload.readers]
        arrived = [arrivals[reader] for reader in readers if reader in arrivals]
        yield Event(rank, instruction, run.begun, max([run.ended, *arrived]))
