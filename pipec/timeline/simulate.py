"""Simulation: the programs that will be executed, played against costs, give the timeline of one step.

The model of time, which planner, search and simulator share: communication overlaps compute, and a directed
channel carries one message at a time. A directed channel leads from a sending rank to a receiving rank. A
message leaves when the program of its rank has reached the send and the channel has carried every message
that was sent into it before; it arrives after the seconds of its link. A compute starts when its rank is free
and everything it reads has arrived. docs/benchmarks.md compares this with steps that ran.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipec.errors import InputError, VerifyError
from pipec.ir import Link, Op, Phase, Program
from pipec.ir.columns import OP_CODE, OPS, Floats, Instructions, Ints, aligned, joined
from pipec.programs.consumers import first_readers
from pipec.programs.memory import peak_in_flight
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


def simulate(programs: Sequence[Program], costs: Costs) -> Timeline:
    """Play ``programs`` against ``costs``. Time and memory are linear in the number of instructions.

    Raises:
        InputError: ``costs`` lack a stage and phase that runs, or are not finite.
        VerifyError: a compute reads a message that is never sent.
    """
    step = _Step(aligned(programs))
    durations = _durations(step, costs)
    if not np.isfinite(durations.sum()):
        raise InputError("a cost is no finite number; expected the time of every phase and link")
    run = run_cells(durations[step.order], _reads(step), step.first_cells)
    if isinstance(run, Stuck):
        raise VerifyError(_explain(step, step.order[run.cells]))
    events = Events(step.ranks, step.events, run.starts[step.cells], run.ends[step.cells])
    return Timeline(events, tuple(map(peak_in_flight, programs)), costs.unit)


class _Step:
    """The computes and sends of all ranks, rank by rank: the events of the timeline.

    Each occupies a resource while it lasts: a compute its rank, a message the directed channel from its rank
    to its peer. The cells of ``run_cells`` are the events resource by resource::

        events      F0  send  F1  send  B0   of rank 0, then  F0  B0  send  ...  of rank 1
        resource     0  0->1   0  0->1   0                     1   1  1->0
        order        0     2   4   5     6 ...   the event of each cell
        cells        0     5   1   6     2 ...   the cell of each event
    """

    def __init__(self, programs: Sequence[Instructions]) -> None:
        timed = [each.is_timed for each in programs]
        self.programs = programs
        self.events = joined([each.where(mask) for each, mask in zip(programs, timed, strict=True)])
        self.receives = joined([each.where(each.ops == OP_CODE[Op.RECV]) for each in programs])
        self.ranks = np.repeat(np.arange(len(programs), dtype=np.int32), [mask.sum() for mask in timed])
        self.is_compute = self.events.is_compute
        channels = (self.ranks.astype(np.int64) + 1) * len(programs) + self.events.peers
        resources = np.where(self.is_compute, self.ranks, channels)
        self.order = np.argsort(resources, kind="stable")
        self.cells = np.empty_like(self.order)
        self.cells[self.order] = np.arange(self.order.size)
        changes = np.flatnonzero(np.diff(resources[self.order], prepend=-1))
        self.first_cells = [*changes.tolist(), self.order.size]

    @property
    def last_computes(self) -> Ints:
        """For each message the compute before its send on its rank, or -1; for each compute itself."""
        numbers = np.maximum.accumulate(np.where(self.is_compute, np.arange(self.ranks.size), -1))
        return np.where(numbers < np.searchsorted(self.ranks, self.ranks), -1, numbers)


def _durations(step: _Step, costs: Costs) -> Floats:
    events = step.events
    kinds = np.zeros((len(OPS), int(events.stages.max(initial=-1)) + 1), bool)
    kinds[events.ops[step.is_compute], events.stages[step.is_compute]] = True
    durations = np.zeros(kinds.shape)
    for code, stage in np.argwhere(kinds).tolist():
        durations[code, stage] = costs.of_compute(stage, Phase(OPS[code]))
    messages = np.array([*(costs.messages.get(link, 0.0) for link in events.links), 0.0])
    return np.where(step.is_compute, durations[events.ops, events.stages], messages[events.link_numbers])


def _reads(step: _Step) -> Reads:
    """What cells wait for: a message for the compute before its send, a compute for the messages it reads.

    A link takes every microbatch to one rank, or is read by no compute.
    """
    events, receives = step.events, step.receives
    sends = np.flatnonzero(events.ops == OP_CODE[Op.SEND])
    cells = np.append(step.cells, AT_START)
    num_microbatches = max(int(each.microbatches.max(initial=-1)) for each in (events, receives)) + 1
    sent = np.full((len(events.links), num_microbatches + 1), NEVER)
    sent[events.link_numbers[sends], events.microbatches[sends]] = cells[sends]
    readers = first_readers(events.where(step.is_compute), receives)
    read = readers >= 0
    arriving = sent[receives.link_numbers[read], receives.microbatches[read]]
    computes = np.flatnonzero(step.is_compute)[readers[read]]
    return Reads(
        np.concatenate([cells[sends], cells[computes]]),
        np.concatenate([cells[step.last_computes[sends]], arriving]),
    )


def _explain(step: _Step, stuck: Ints) -> str:
    where = []
    for event in stuck[step.is_compute[stuck]].tolist():
        rank = int(step.ranks[event])
        number = event - int(np.searchsorted(step.ranks, rank))
        instructions = np.flatnonzero(step.programs[rank].is_timed)
        where.append(f"rank {rank} at instruction {instructions[number]}")
    return f"these wait for messages that are never sent: {', '.join(where)}; verify_programs tells why"
