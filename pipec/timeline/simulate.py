"""Simulation: the timeline of one step from its programs and costs.

Planner, search and simulator share one model of time. Communication overlaps compute. A directed channel
leads from a sending rank to a receiving rank and carries one message at a time. A message leaves when the
program of its rank has reached the send and the channel has carried all earlier messages; it arrives after
the seconds of its link. A compute starts when its rank is free and all its inputs have arrived. A collective
overlaps compute, too, and starts when all its ranks have reached it and finished earlier collectives. Copies
to and from host memory also overlap compute; a rank makes one at a time in each direction. An update occupies
its rank, after the collectives before it have ended. docs/benchmarks.md compares this with measured steps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipec.errors import InputError, VerifyError
from pipec.ir import Link, Op, Phase, Program
from pipec.ir.columns import (
    OP_CODE,
    OPS,
    Floats,
    InstructionColumns,
    Ints,
    concatenate_instructions,
    with_shared_links,
)
from pipec.programs.message_readers import first_readers
from pipec.programs.offload_intervals import copy_dependencies
from pipec.programs.rank_memory import peak_in_flight
from pipec.programs.representative_replicas import RepresentativeReplicas
from pipec.programs.task_times import AVAILABLE_AT_START, NEVER_PRODUCED, Deadlock, TaskInputs, run_tasks
from pipec.timeline.events import Events, Timeline


@dataclass(frozen=True, slots=True)
class SimulationCosts:
    """Times of computes, ``compute[stage, phase]``, and of messages between ranks, ``messages[link]``.

    ``sync_times`` are the times of collectives and updates by op, stage and bucket. Entries missing in
    ``messages`` or ``sync_times`` take no time. ``segments`` has the fractions of a phase's time for its
    functions, if it consists of several, and ``model_collectives[stage, number]`` the times of the
    collectives between these. ``copy_times[stage]`` is the time of an offload, or of a prefetch. The first
    instruction runs at ``start_time``. ``unit`` is the unit of time, for display.
    """

    compute: Mapping[tuple[int, Phase], float]
    messages: Mapping[Link, float] = field(default_factory=dict)
    unit: str = "s"
    sync_times: Mapping[tuple[Op, int, int], float] = field(default_factory=dict)
    segments: Mapping[tuple[int, Phase], Sequence[float]] = field(default_factory=dict)
    model_collectives: Mapping[tuple[int, int], float] = field(default_factory=dict)
    copy_times: Mapping[int, float] = field(default_factory=dict)
    start_time: float = 0.0

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
    ) -> "SimulationCosts":
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

    def compute_time(self, stage: int, phase: Phase, segment: int = -1) -> float:
        """Time of one phase of a stage, or of a segment of it; raises ``InputError`` if it is not given."""
        if (stage, phase) not in self.compute:
            raise InputError(
                f"no cost is given for {phase} of stage {stage}; add it to SimulationCosts.compute"
            )
        shares = self.segments.get((stage, phase), ())
        if segment >= len(shares):
            raise InputError(
                f"no fraction is given for segment {segment} of {phase} of stage {stage}; "
                "add it to SimulationCosts.segments"
            )
        return self.compute[stage, phase] * (1.0 if segment < 0 else shares[segment])


def simulate(
    programs: Sequence[Program], costs: SimulationCosts, few: RepresentativeReplicas | None = None
) -> Timeline:
    """Play ``programs`` against ``costs``. Time and memory are linear in the number of instructions.

    If the programs are those of a ``few`` replicas of a step, the timeline has the step's microbatches.

    Raises:
        InputError: ``costs`` lack a stage and phase that runs, or are not finite.
        VerifyError: a compute reads a message that is never sent.
    """
    step = _Step(with_shared_links(programs))
    durations = np.append(_durations(step, costs), np.zeros(step.num_arrivals))
    if not np.isfinite(durations.sum()):
        raise InputError("a cost is no finite number; expected the time of every phase and link")
    run = run_tasks(durations[step.order], _reads(step), step.first_tasks, step.groups)
    if isinstance(run, Deadlock):
        raise VerifyError(_explain(step, step.order[run.tasks]))
    tasks = step.tasks[: len(step.events)]
    shown = step.events
    if few:
        shown = shown.for_microbatches(few.microbatches(shown.microbatches))
    events = Events(
        step.ranks, shown, costs.start_time + run.starts[tasks], costs.start_time + run.ends[tasks]
    )
    peaks = tuple(map(peak_in_flight, programs))
    return Timeline(events, peaks, costs.unit, representatives=few.representatives if few else None)


class _Step:
    """The events of the timeline on all ranks, rank by rank.

    Each occupies a resource while it lasts: computes and updates their rank, a message the channel from its
    rank to its peer, a collective its rank's place for collectives, a copy one direction of its rank's link
    to the host. The tasks of ``run_tasks`` are the events resource by resource, and those of a rank form one
    of the ``groups``. Here rank 0 has the events 0 to 4::

        event             0     1     2     3     4     5     6     7
        instruction       F0    send  F1    send  B0    F0    B0    send
        resource          0     0->1  0     0->1  0     1     1     1->0
        task              0     3     1     4     2     5     6     7
        order, by task    0     2     4     1     3     5     6     7

    A collective is an event on each of its ranks. Each has also a task without duration, numbered after the
    events: the arrival of the rank. The arrivals of one collective follow each other.
    """

    def __init__(self, programs: Sequence[InstructionColumns]) -> None:
        timed = [each.is_timed for each in programs]
        self.programs = programs
        self.events = concatenate_instructions(
            [each.where(mask) for each, mask in zip(programs, timed, strict=True)]
        )
        self.receives = concatenate_instructions(
            [each.where(each.ops == OP_CODE[Op.RECV]) for each in programs]
        )
        received = [int((each.ops == OP_CODE[Op.RECV]).sum()) for each in programs]
        self.receivers = np.repeat(np.arange(len(programs), dtype=np.int32), received)
        self.ranks = np.repeat(np.arange(len(programs), dtype=np.int32), [mask.sum() for mask in timed])
        self.is_compute = self.events.is_compute
        self.sends = np.flatnonzero(self.events.ops == OP_CODE[Op.SEND])
        self.collectives = np.flatnonzero(self.events.is_collective)
        self.copies = [np.flatnonzero(self.events.ops == OP_CODE[op]) for op in (Op.OFFLOAD, Op.PREFETCH)]
        self.occupies_rank = self.is_compute | (self.events.ops == OP_CODE[Op.UPDATE])
        self.collective_numbers = collective_numbers(self.events, self.ranks, self.collectives)
        self._lay_out()

    @property
    def num_arrivals(self) -> int:
        return self.collectives.size

    def _lay_out(self) -> None:
        """Number the tasks: events rank by rank, and on each of them resource by resource; then arrivals."""
        num_ranks = len(self.programs)
        most = num_ranks + 4  # of a rank: itself, a channel to each rank, collectives, and copies both ways
        own = self.ranks.astype(np.int64) * most
        resources = np.concatenate([own, num_ranks * most + self.collective_numbers])
        resources[self.sends] += 1 + self.events.peers[self.sends]
        for number, events in enumerate((self.collectives, *self.copies), start=1 + num_ranks):
            resources[events] += number
        self.order = np.argsort(resources, kind="stable").astype(np.int32)
        self.tasks = np.empty_like(self.order)
        self.tasks[self.order] = np.arange(self.order.size, dtype=np.int32)
        resources = resources[self.order]
        bounds = np.flatnonzero(np.diff(resources, prepend=-1))
        self.first_tasks = [*bounds.tolist(), self.order.size]
        self.groups = np.flatnonzero(np.diff(resources[bounds] // most, prepend=-1)).tolist()

    def last_before(self, mask: NDArray[np.bool_], events: Ints) -> Ints:
        """The last event before each of these on its rank at which ``mask`` is true, or -1."""
        if not events.size:
            return events
        latest = np.maximum.accumulate(np.where(mask, np.arange(self.ranks.size), -1))
        before = np.concatenate([[-1], latest])[events]
        first_of_rank = np.searchsorted(self.ranks, range(len(self.programs)))
        return np.where(before < first_of_rank[self.ranks[events]], -1, before)


def collective_numbers(events: InstructionColumns, ranks: Ints, collectives: Ints) -> Ints:
    """For each of these collectives its number: of several equal ones on a rank, the k-th belong together."""
    numbers: dict[tuple[int, ...], int] = {}
    seen: dict[tuple[int, ...], int] = {}
    found = np.empty(collectives.size, np.int64)
    keyed = zip(ranks[collectives].tolist(), _keys(events, collectives), strict=True)
    for place, (rank, key) in enumerate(keyed):
        turn = seen[rank, *key] = seen.get((rank, *key), -1) + 1
        found[place] = numbers.setdefault((turn, *key), len(numbers))
    return found


def _durations(step: _Step, costs: SimulationCosts) -> Floats:
    events = step.events
    sizes = (int(each.max(initial=-1)) for each in (events.stages, events.segments))
    kinds = np.zeros((len(OPS), *(2 + size for size in sizes)), bool)
    kind_of = events.ops, events.stages, events.segments + 1
    kinds[tuple(each[step.is_compute] for each in kind_of)] = True
    durations = np.zeros(kinds.shape)
    for code, stage, segment in np.argwhere(kinds).tolist():
        durations[code, stage, segment] = costs.compute_time(stage, Phase(OPS[code]), segment - 1)
    messages = np.array([*(costs.messages.get(link, 0.0) for link in events.links), 0.0])
    found = np.where(step.is_compute, durations[kind_of], messages[events.link_numbers])
    others = np.flatnonzero(~step.is_compute & (events.link_numbers < 0))
    for event, (op, stage, bucket, collective) in zip(others.tolist(), _keys(events, others), strict=True):
        sync_time = costs.sync_times.get((OPS[op], stage, bucket), 0.0)
        found[event] = costs.model_collectives.get((stage, collective), 0.0) if collective >= 0 else sync_time
    copies = np.flatnonzero(events.is_copy)
    found[copies] = [costs.copy_times.get(stage, 0.0) for stage in events.stages[copies].tolist()]
    return found


def _keys(events: InstructionColumns, which: Ints) -> list[list[int]]:
    columns = events.ops, events.stages, events.buckets, events.model_collectives
    keys: list[list[int]] = np.stack([column[which] for column in columns]).T.tolist()
    return keys


def _reads(step: _Step) -> TaskInputs:
    """The inputs of tasks: messages and collectives read the compute before them, computes their inputs."""
    pairs = [_message_reads(step), *_collective_reads(step), *_copy_reads(step)]
    return TaskInputs(*(np.concatenate(parts) for parts in zip(*pairs, strict=True)))


def _message_reads(step: _Step) -> tuple[Ints, Ints]:
    """A message reads the compute before its send, a compute the messages that it reads."""
    events, receives, sends = step.events, step.receives, step.sends
    tasks = np.append(step.tasks, np.int32(AVAILABLE_AT_START))
    num_microbatches = max(int(each.microbatches.max(initial=-1)) for each in (events, receives)) + 1
    sent = np.full((len(events.links), num_microbatches + len(step.programs)), NEVER_PRODUCED, np.int32)

    def columns(messages: InstructionColumns, targets: Ints) -> Ints:
        once = messages.microbatches < 0
        return np.where(once, num_microbatches + targets, messages.microbatches)

    carried = events.where(events.ops == OP_CODE[Op.SEND])
    sent[carried.link_numbers, columns(carried, carried.peers)] = tasks[sends]
    computes = np.flatnonzero(step.is_compute)
    readers = first_readers(events.where(step.is_compute), step.ranks[computes], receives, step.receivers)
    read = readers >= 0
    arriving = sent[receives.link_numbers, columns(receives, step.receivers)][read]
    before = step.last_before(step.occupies_rank, sends)
    return (
        np.concatenate([tasks[sends], tasks[computes[readers[read]]]]),
        np.concatenate([tasks[before], arriving]),
    )


def _collective_reads(step: _Step) -> Iterator[tuple[Ints, Ints]]:
    """An arrival reads the previous events of its rank, and a collective the last arrival of its ranks.

    An update reads the collective before it. A compute reads the last gathering of its stage's parameters,
    and a later segment the model collective before it.
    """
    tasks, events, own = np.append(step.tasks, np.int32(AVAILABLE_AT_START)), step.events, step.collectives
    arrivals = step.tasks[len(events) :]
    for mask in (step.occupies_rank, events.is_collective):
        yield arrivals, tasks[step.last_before(mask, own)]
    last = np.full(int(step.collective_numbers.max(initial=-1)) + 1, -1, np.int32)
    np.maximum.at(last, step.collective_numbers, arrivals)
    yield tasks[own], last[step.collective_numbers]
    updates = np.flatnonzero(events.ops == OP_CODE[Op.UPDATE])
    yield tasks[updates], tasks[step.last_before(events.is_collective, updates)]
    for needed, readers in awaited_collectives(events):
        computes = np.flatnonzero(readers)
        yield tasks[computes], tasks[step.last_before(needed, computes)]


def _copy_reads(step: _Step) -> Iterator[tuple[Ints, Ints]]:
    """A copy reads the compute before it, and a compute the copies that it waits for."""
    tasks, copies = np.append(step.tasks, np.int32(AVAILABLE_AT_START)), np.concatenate(step.copies)
    yield tasks[copies], tasks[step.last_before(step.occupies_rank, copies)]
    readers, read = copy_dependencies(step.events)
    yield tasks[readers], tasks[read]


def awaited_collectives(events: InstructionColumns) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """Collectives, and the computes that read the last one of them before."""
    gathers, joint = events.ops == OP_CODE[Op.UNSHARD], events.is_collective & (events.model_collectives >= 0)
    for stage in np.unique(events.stages[gathers | joint]).tolist():
        computes = events.is_compute & (events.stages == stage)
        yield gathers & (events.stages == stage), computes
        yield joint & (events.stages == stage), computes & (events.segments > 0)


def _explain(step: _Step, stuck: Ints) -> str:
    where = []
    for event in stuck[stuck < len(step.events)].tolist():
        if step.is_compute[event]:
            rank = int(step.ranks[event])
            number = event - int(np.searchsorted(step.ranks, rank))
            instructions = np.flatnonzero(step.programs[rank].is_timed)
            where.append(f"rank {rank} at instruction {instructions[number]}")
    return f"these wait for messages that are never sent: {', '.join(where)}; pipec.programs.verify tells why"
