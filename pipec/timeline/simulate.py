"""Simulation: the programs that will be executed, played against costs, give the timeline of one step.

Communication overlaps compute. A message leaves when its rank's program reaches the send and arrives
after the seconds of its link; messages do not slow each other down. A compute starts when its rank is
free and everything it reads has arrived.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipec.errors import InputError, VerifyError
from pipec.ir import Link, Op, Phase, Program
from pipec.ir.columns import OP_CODE, OPS, Floats, Instructions, Ints, aligned, joined
from pipec.programs.consumers import first_readers
from pipec.programs.memory import in_flight
from pipec.programs.timing import AT_START, NEVER, Reads, Stuck, run_cells
from pipec.timeline.events import Events, Timeline


@dataclass(frozen=True, slots=True)
class Costs:
    """How long things take: ``compute[stage, phase]``, and ``messages[link]`` between ranks.

    A link that ``messages`` lacks takes no time. ``unit`` is the unit of time, for those who show it.
    """

    compute: Mapping[tuple[int, Phase], float]
    messages: Mapping[Link, float] = field(default_factory=dict)
    unit: str = "s"

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        links: Iterable[Link] = (),
        message: float = 0.0,
        unit: str = "units",
    ) -> "Costs":
        """The same for every stage and every one of ``links``. A fused backward is the sum of its halves."""
        phases = {
            Phase.FORWARD: forward,
            Phase.RECOMPUTE: forward,
            Phase.BACKWARD: backward_input + backward_weight,
            Phase.BACKWARD_INPUT: backward_input,
            Phase.BACKWARD_WEIGHT: backward_weight,
        }
        compute = {(stage, phase): cost for stage in range(num_stages) for phase, cost in phases.items()}
        return cls(compute, dict.fromkeys(links, message), unit)

    def of_compute(self, stage: int, phase: Phase) -> float:
        """Time of one phase of a stage; raises ``InputError`` if it is not given."""
        if (stage, phase) not in self.compute:
            raise InputError(f"no cost is given for {phase} of stage {stage}; add it to Costs.compute")
        return self.compute[stage, phase]


def peak_in_flight(program: Program) -> int:
    """The most pairs of stage and microbatch a rank holds at once between their forward and their free."""
    (columns,) = aligned([program])
    return int(in_flight(columns).max(initial=0))


def simulate(programs: Sequence[Program], costs: Costs) -> Timeline:
    """Play ``programs`` against ``costs``. Time and memory are linear in the number of instructions.

    Raises:
        InputError: ``costs`` lack a stage and phase that runs, or are not finite.
        VerifyError: a compute reads a message that is never sent.
    """
    step = _Step(aligned(programs))
    durations = _durations(step.computes, costs)
    delays = np.array([*(costs.messages.get(link, 0.0) for link in step.events.links), 0.0])
    if not np.isfinite(durations.sum() + delays.sum()):
        raise InputError("a cost is no finite number; expected the time of every phase and link")
    run = run_cells(durations, _reads(step, delays), step.first_computes)
    if isinstance(run, Stuck):
        raise VerifyError(_explain(step, run))
    starts = np.append(run.ends, 0.0)[step.last_computes]
    starts[step.is_compute] = run.starts
    ends = starts + delays[step.events.link_numbers]
    ends[step.is_compute] = run.ends
    events = Events(step.ranks, step.events, starts, ends)
    return Timeline(events, tuple(map(peak_in_flight, programs)), costs.unit)


class _Step:
    """The computes, sends and receives of all ranks, rank by rank."""

    def __init__(self, programs: Sequence[Instructions]) -> None:
        timed = [each.is_timed for each in programs]
        self.programs = programs
        self.events = joined([each.where(mask) for each, mask in zip(programs, timed, strict=True)])
        self.receives = joined([each.where(each.ops == OP_CODE[Op.RECV]) for each in programs])
        self.ranks = np.repeat(np.arange(len(programs), dtype=np.int32), [mask.sum() for mask in timed])
        self.is_compute = self.events.is_compute
        self.computes = self.events.where(self.is_compute)
        self.first_computes = np.searchsorted(self.ranks[self.is_compute], range(len(programs) + 1)).tolist()

    @cached_property
    def last_computes(self) -> Ints:
        """Each compute's own number, and for each message that of the compute before it on its rank."""
        numbers = np.cumsum(self.is_compute) - 1
        return np.where(numbers < np.array(self.first_computes)[self.ranks], AT_START, numbers)


def _durations(computes: Instructions, costs: Costs) -> Floats:
    kinds = np.zeros((len(OPS), int(computes.stages.max(initial=-1)) + 1), bool)
    kinds[computes.ops, computes.stages] = True
    durations = np.zeros(kinds.shape)
    for code, stage in np.argwhere(kinds).tolist():
        durations[code, stage] = costs.of_compute(stage, Phase(OPS[code]))
    return durations[computes.ops, computes.stages]


def _reads(step: _Step, delays: Floats) -> Reads:
    """What each compute waits for; a link takes every microbatch to one rank, or is read by no compute."""
    events, receives = step.events, step.receives
    sent = events.ops == OP_CODE[Op.SEND]
    num_microbatches = max(int(each.microbatches.max(initial=-1)) for each in (events, receives)) + 1
    makers = np.full((len(events.links), num_microbatches + 1), NEVER)
    makers[events.link_numbers[sent], events.microbatches[sent]] = step.last_computes[sent]
    readers = first_readers(step.computes, receives)
    read = readers >= 0
    links, microbatches = receives.link_numbers[read], receives.microbatches[read]
    return Reads(readers[read], makers[links, microbatches], delays[links])


def _explain(step: _Step, stuck: Stuck) -> str:
    where = []
    for rank, compute in zip(step.ranks[step.is_compute][stuck.cells].tolist(), stuck.cells, strict=True):
        numbers = np.flatnonzero(step.programs[rank].is_compute)
        where.append(f"rank {rank} at instruction {numbers[compute - step.first_computes[rank]]}")
    return f"these wait for messages that are never sent: {', '.join(where)}; verify_programs tells why"
