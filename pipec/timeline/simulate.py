"""Simulation: the timeline of one step from its programs and costs.

Planner, search and simulator share one model of time. Communication overlaps compute. A directed channel
leads from a sending rank to a receiving rank and carries one message at a time. A message leaves when the
program of its rank has reached the send and the channel has carried all earlier messages; it arrives after
the seconds of its link. A compute starts when its rank is free. A collective overlaps compute, too, and
starts when all its ranks have reached it and finished earlier collectives. Copies to and from host memory
also overlap compute; a rank makes one at a time in each direction. An update occupies its rank; one in host
memory overlaps the work that was started before it. A wait holds its rank until what it is for has ended.
docs/benchmarks.md compares this with measured steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipec.errors import InputError, VerifyError
from pipec.ir import Link, Op, Phase, Program
from pipec.ir.columns import OP_CODE, OPS, Floats, InstructionColumns, Ints, one_of, with_shared_links
from pipec.programs.messages import collective_numbers
from pipec.programs.rank_memory import peak_in_flight
from pipec.programs.task_times import AVAILABLE_AT_START, Deadlock, TaskInputs, run_tasks
from pipec.timeline.events import Events, Timeline
from pipec.timeline.step_events import COPY_LANES, StepEvents


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

    def compute_time(self, stage: int, phase: Phase, segment: int = -1) -> float:
        """Time of one phase of a stage, or of a segment of it; raises ``InputError`` if it is not given."""
        if (stage, phase) not in self.compute:
            raise InputError(
                f"no cost is given for {phase} of stage {stage}; add it to SimulationCosts.compute"
            )
        share = 1.0 if segment < 0 else self.segments[stage, phase][segment]
        return self.compute[stage, phase] * share


def simulate(programs: Sequence[Program], costs: SimulationCosts) -> Timeline:
    """Play ``programs`` against ``costs``. Time and memory are linear in the number of instructions.

    What other ranks than theirs send, or receive, is left out.

    Raises:
        InputError: ``costs`` lack a stage and phase that runs, or are not finite.
        VerifyError: a wait is for a message that is never sent, or computes wait for each other.
    """
    step = _Step(_among_themselves(programs))
    for wait in np.flatnonzero(step.awaited < 0).tolist()[:1]:
        where = f"rank {step.wait_ranks[wait]} at instruction {step.wait_sites[wait]}"
        raise VerifyError(f"{where} waits for what is never sent; pipec.programs.verify tells why")
    durations = np.append(_durations(step, costs), np.zeros(step.arrivals.size))
    if not np.isfinite(durations.sum()):
        raise InputError("a cost is no finite number; expected the time of every phase and link")
    run = run_tasks(durations[step.order], _reads(step), step.first_tasks)
    if isinstance(run, Deadlock):
        raise VerifyError(_explain(step, step.order[run.tasks]))
    tasks = step.tasks[: len(step.events)]
    events = Events.at(
        step.ranks, step.events, costs.start_time + run.starts[tasks], costs.start_time + run.ends[tasks]
    )
    waits = step.waits(*_wait_times(step, events.ends, costs.start_time))
    return Timeline(events, tuple(map(peak_in_flight, programs)), costs.unit, waits=waits)


def _among_themselves(programs: Sequence[Program]) -> list[InstructionColumns]:
    """The instructions of each rank, with peers as numbers of ``programs``, without those for other peers."""
    columns, ranks = with_shared_links(programs), [program.rank for program in programs]
    last = max(int(each.peers.max(initial=max(ranks))) for each in columns)
    if ranks == [*range(last + 1)]:
        return columns
    numbers = np.full(last + 2, -2, np.int32)
    numbers[[*ranks, -1]] = [*range(len(ranks)), -1]
    found = []
    for each in columns:
        own = each.where(numbers[each.peers] > -2)
        found.append(InstructionColumns((*own.columns[:4], numbers[own.peers], *own.columns[5:]), own.links))
    return found


class _Step(StepEvents):
    """The events and waits as tasks of ``run_tasks``.

    Each event occupies a resource while it lasts: computes and updates their rank, a message the channel from
    its rank to its peer, a collective its rank's place for collectives, a copy one direction of its rank's
    link to the host, an update in host memory its host. The tasks of ``run_tasks`` are the events resource by
    resource. Here rank 0 has the events 0 to 4::

        event             0     1     2     3     4     5     6     7
        instruction       F0    send  F1    send  B0    F0    B0    send
        resource          0     0->1  0     0->1  0     1     1     1->0
        task              0     3     1     4     2     5     6     7
        order, by task    0     2     4     1     3     5     6     7

    A collective is an event on each of its ranks. Each has also a task without duration, numbered after the
    events: the arrival of the rank. The arrivals of one collective follow each other.

    ``begins[event]`` is the task with which an event begins: of a collective, the arrival.
    """

    def __init__(self, programs: Sequence[InstructionColumns]) -> None:
        super().__init__(programs)
        self.programs = programs
        self.sends = np.flatnonzero(self.events.ops == OP_CODE[Op.SEND])
        self.collectives = np.flatnonzero(self.events.is_collective)
        self.copies = [np.flatnonzero(one_of(*lane)[self.events.ops]) for lane in COPY_LANES]
        started = self.events.taken(self.collectives)
        self.collective_numbers = collective_numbers(started, self.ranks[self.collectives])
        self._lay_out()
        self.arrivals = self.tasks[len(self.events) :]
        self.begins = self.tasks[: len(self.events)].copy()
        self.begins[self.collectives] = self.arrivals

    def _lay_out(self) -> None:
        """Number the tasks: events rank by rank, and on each of them resource by resource; then arrivals."""
        num_ranks = len(self.programs)
        # of a rank: itself, a channel to each rank, collectives, copies both ways, and its host
        most = num_ranks + 2 + len(COPY_LANES)
        own = self.ranks.astype(np.int64) * most
        resources = np.concatenate([own, num_ranks * most + self.collective_numbers])
        resources[self.sends] += 1 + self.events.peers[self.sends]
        for number, events in enumerate((self.collectives, *self.copies), start=1 + num_ranks):
            resources[events] += number
        self.order = np.argsort(resources, kind="stable").astype(np.int32)
        self.tasks = np.empty_like(self.order)
        self.tasks[self.order] = np.arange(self.order.size, dtype=np.int32)
        bounds = np.flatnonzero(np.diff(resources[self.order], prepend=-1))
        self.first_tasks = [*bounds.tolist(), self.order.size]

    def last_before(self, mask: NDArray[np.bool_], events: Ints, ranks: Ints) -> Ints:
        """The last event of ``ranks`` before each of ``events`` at which ``mask`` is true, or -1."""
        if not events.size:
            return events
        latest = np.maximum.accumulate(np.where(mask, np.arange(self.ranks.size, dtype=np.int32), -1))
        before = np.concatenate([[-1], latest])[events]
        return np.where(before < self.first_events[ranks], -1, before)


def _durations(step: _Step, costs: SimulationCosts) -> Floats:
    events = step.events
    sizes = (int(each.max(initial=-1)) for each in (events.stages, events.segments))
    kinds = np.zeros((len(OPS), *(2 + size for size in sizes)), bool)
    kind_of = events.ops, events.stages, events.segments + 1
    kinds[tuple(each[step.events.is_compute] for each in kind_of)] = True
    durations = np.zeros(kinds.shape)
    for code, stage, segment in np.argwhere(kinds).tolist():
        durations[code, stage, segment] = costs.compute_time(stage, Phase(OPS[code]), segment - 1)
    messages = np.array([*(costs.messages.get(link, 0.0) for link in events.links), 0.0])
    found = np.where(step.events.is_compute, durations[kind_of], messages[events.link_numbers])
    others = np.flatnonzero(~step.events.is_compute & (events.link_numbers < 0))
    for event, (op, stage, bucket, collective) in zip(others.tolist(), _keys(events, others), strict=True):
        sync_time = costs.sync_times.get((OPS[op], stage, bucket), 0.0)
        found[event] = costs.model_collectives.get((stage, collective), 0.0) if collective >= 0 else sync_time
    copies = np.flatnonzero(events.is_copy & (events.microbatches >= 0))
    found[copies] = [costs.copy_times.get(stage, 0.0) for stage in events.stages[copies].tolist()]
    return found


def _keys(events: InstructionColumns, which: Ints) -> list[list[int]]:
    columns = events.ops, events.stages, events.buckets, events.model_collectives
    keys: list[list[int]] = np.stack([column[which] for column in columns]).T.tolist()
    return keys


def _reads(step: _Step) -> TaskInputs:
    """The inputs of tasks: what a rank starts reads the compute before, and what follows a wait its end."""
    pairs = [*_start_reads(step), *_arrival_reads(step), *_wait_reads(step), *_host_reads(step)]
    return TaskInputs(*(np.concatenate(parts) for parts in zip(*pairs, strict=True)))


def _start_reads(step: _Step) -> Iterator[tuple[Ints, Ints]]:
    """A message and a copy read the work before them, a collective the last arrival of its ranks."""
    tasks, own = np.append(step.tasks, np.int32(AVAILABLE_AT_START)), step.collectives
    for started in (step.sends, *step.copies[:2]):
        yield tasks[started], tasks[step.last_before(step.events.is_blocking, started, step.ranks[started])]
    last = np.full(int(step.collective_numbers.max(initial=-1)) + 1, -1, np.int32)
    np.maximum.at(last, step.collective_numbers, step.arrivals)
    yield tasks[own], last[step.collective_numbers]


def _arrival_reads(step: _Step) -> Iterator[tuple[Ints, Ints]]:
    """A rank arrives at a collective after its previous work, and after its previous collective."""
    tasks = np.append(step.tasks, np.int32(AVAILABLE_AT_START))
    ranks = step.ranks[step.collectives]
    for mask in (step.events.is_blocking, step.events.is_collective):
        yield step.arrivals, tasks[step.last_before(mask, step.collectives, ranks)]


def _wait_reads(step: _Step) -> Iterator[tuple[Ints, Ints]]:
    """The next work of a rank after a wait reads what is awaited; so does what it starts before that."""
    following, last = step.next_events, step.first_events[step.wait_ranks + 1]
    ended = step.tasks[step.awaited]
    while following.size:
        at_work = step.next_blocking[following]
        found = at_work < last
        yield step.begins[at_work[found]], ended[found]
        between = following < np.minimum(at_work, last)
        following, last, ended = following[between], last[between], ended[between]
        yield step.begins[following], ended
        following = following + 1


def _host_reads(step: _Step) -> Iterator[tuple[Ints, Ints]]:
    """What a rank does behind an update in host memory, which its device did not wait for."""
    updates = step.copies[-1]
    following, last = step.next_blocking[updates + 1], step.first_events[step.ranks[updates] + 1]
    found = following < last
    yield step.begins[following[found]], step.tasks[updates[found]]


def _wait_times(step: _Step, ends: Floats, start_time: float) -> tuple[Floats, Floats]:
    """When each wait begins, after the work and the waits before it, and when it ends."""
    before = step.last_before(step.events.is_blocking, step.next_events, step.wait_ranks)
    begun = np.append(ends, start_time)[before]
    ended = np.maximum(begun, ends[step.awaited])
    for waits in np.split(ended, np.searchsorted(step.wait_ranks, range(1, len(step.programs)))):
        np.maximum.accumulate(waits, out=waits)
    follows = np.flatnonzero(step.wait_ranks[1:] == step.wait_ranks[:-1])
    begun[follows + 1] = np.maximum(begun[follows + 1], ended[follows])
    return begun, ended


def _explain(step: _Step, stuck: Ints) -> str:
    where = []
    for event in stuck[stuck < len(step.events)].tolist():
        if step.events.is_compute[event]:
            rank = int(step.ranks[event])
            number = event - int(step.first_events[rank])
            instructions = np.flatnonzero(step.programs[rank].is_timed)
            where.append(f"rank {rank} at instruction {instructions[number]}")
    return f"these wait for each other: {', '.join(where)}; pipec.programs.verify tells why"
