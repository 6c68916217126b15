"""Lowering: from a compute-only schedule to the program of each rank, with communication, buffers and frees.

Lowering puts the positions of all ranks into one linear order: computes are ordered by the times at which
they end if forward, input gradient and weight gradient take one unit of time each and messages take none. A
message is sent right after the compute that makes it, and its receive is posted no later in that order. So an
instruction only waits for instructions before it in one order over all ranks, and the programs cannot
deadlock, even if every send waits for its receive.

A transfer overlaps a compute only if its receive is posted before the compute begins. A receive that would be
posted directly before its reader is therefore posted one compute earlier. The exception is a message that
depends on that compute: the two cannot overlap, and a receive that waits on the device for a later compute
may block it. On each directed channel between two ranks, receives are posted in the order of the sends.

After a backward, gradients are sent to the previous stage first, then accumulated: the other rank is waiting.
At one position stand::

    recv    collectives, updates    recompute    compute    send    accumulate    free    pause    copies

``due`` adds the waits and whatever else these instructions demand, from the table of cells.

A step may have millions of instructions, so lowering works on columns of numbers, a rank or a link at a time.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from pipec.errors import VerifyError
from pipec.ir import (
    NO_SYNC,
    Link,
    Mode,
    ModelCollectives,
    Op,
    OpKind,
    Payload,
    Phase,
    Plan,
    Program,
    Schedule,
    Stage,
    SyncSpec,
    Value,
    replica_counts,
    stages_on,
)
from pipec.ir.columns import (
    NUM_COLUMNS,
    OP_CODE,
    PHASE_CODE,
    Floats,
    InstructionColumns,
    Ints,
    compact,
    concatenate_instructions,
    constant,
    entries,
    one_of,
    read_versions,
    stable_order,
    taken,
)
from pipec.programs import update_boundaries
from pipec.programs.buffer_slots import with_slots
from pipec.programs.dependence import Bools, Dependence
from pipec.programs.due import with_due
from pipec.programs.messages import Messages, messages
from pipec.programs.offload_intervals import OffloadIntervals, offload_intervals
from pipec.programs.program_index import ProgramIndex
from pipec.programs.schedule_index import ScheduleIndex
from pipec.programs.shared_receives import holding_stages
from pipec.programs.sync_order import SyncOp, SyncOrder
from pipec.programs.tail_order import loss_reads, num_forwards
from pipec.programs.task_times import Deadlock, TaskInputs, run_tasks


def chain_links(num_stages: int, training: bool = True) -> tuple[Link, ...]:
    """A plain chain of stages: ``hidden_k`` goes into stage k; in training ``grad_hidden_k`` comes back."""

    def value(name: str) -> tuple[Value, ...]:
        return (Value(name, "float32", ("b",)),)

    forward = [Link(k - 1, k, Payload.ACTIVATION, value(f"hidden_{k}")) for k in range(1, num_stages)]
    backward = [Link(k, k - 1, Payload.GRADIENT, value(f"grad_hidden_{k}")) for k in range(1, num_stages)]
    return (*forward, *backward) if training else tuple(forward)


def bare_plan(schedule: Schedule, links: Sequence[Link], sync_spec: SyncSpec = NO_SYNC) -> Plan:
    """The plan of a schedule whose stages have no parameters and no costs."""
    stages = tuple(Stage(number, number, number) for number in range(schedule.num_stages))
    return Plan(
        Mode.TRAIN,
        schedule.name,
        schedule.num_microbatches,
        microbatch_size=1,
        placement=schedule.placement,
        stages=stages,
        links=tuple(links),
        sync_spec=sync_spec,
    )


def lower(schedule: Schedule, plan: Plan) -> tuple[Program, ...]:
    """One program per rank: ``schedule`` with the communication, reductions and updates of ``plan``.

    Tied weights are sent to their borrowers first, and then the microbatches run. Weight gradients and
    results are sent after the last compute of their rank. Stages that recompute replay their forward
    directly before the backward, or its input half, of each microbatch. Gradients are reduced, and weights
    updated, as soon as the last backward of their stage has ended. A phase of several functions runs as a
    whole, unless gradients can be reduced or model collectives run between these. Stages that offload keep
    their saved values in host memory.

    Raises:
        VerifyError: a compute is missing, doubled or on the wrong rank, or computes wait for each other.
    """
    links, sync_spec, model_collectives = plan.links, plan.sync_spec, plan.model_collectives
    recompute, offload = plan.recomputing_stages, plan.offloading_stages
    pauses = plan.mode is Mode.OUTPUTS
    index = ScheduleIndex(schedule, plan)
    rounds = update_boundaries.update_boundaries(index)
    traffic = _Traffic.of(index, links, pauses)
    order = _unit_order(index, traffic, rounds, plan)
    arriving, leaving = traffic.by_rank(traffic.messages.targets), traffic.by_rank(traffic.messages.sources)
    depends = traffic.depend_on_compute_before_reader(order.dependence)
    sums: list[tuple[float, SyncOp]] = []
    if schedule.stream:
        sums, collectives = update_boundaries.round_collectives(schedule, rounds, order.ends, sync_spec)
    else:
        collectives = SyncOrder(index, order.ends, plan).all()
    buffered = np.array([*(link.payload.feeds_compute for link in links), False])
    stages_of_link = holding_stages(links)
    versions = read_versions(schedule.stream, schedule.placement, schedule.num_microbatches)
    sums_of, ops_of = defaultdict[int, list[tuple[float, SyncOp]]](list), defaultdict[int, list[SyncOp]](list)
    for time, each in sums:
        for rank in each.positions:
            sums_of[rank].append((time, each))
    for each in collectives:
        for rank in each.positions:
            ops_of[rank].append(each)
    programs = []
    for rank in range(schedule.num_ranks):
        copies = offload_intervals(index.computes[rank], offload)
        blocks = [
            [_receives(traffic, order, rank, arriving[rank], depends, sums_of[rank])],
            [_sync_ops(ops_of[rank], rank, OpKind.COLLECTIVE, OpKind.COPY)],
            _model_collectives(index, rank, model_collectives),
            [_sync_ops(ops_of[rank], rank, OpKind.LOCAL)],
            [_sync_ops(ops_of[rank], rank, OpKind.STEP_COMPUTE)],
            [_recomputes(index, rank, recompute, versions)],
            [_computes(index, rank, versions)],
            [_sends(traffic, leaving[rank])],
            [_accumulates(index, rank)],
            [_copies(copies, Op.WAIT_OFFLOAD, copies.offloads + 1)],
            _frees(index, rank),
            [_sync_ops(ops_of[rank], rank, OpKind.RELEASE)],
            [_pause(num_forwards(index, rank))] if pauses else [],
            [_copies(copies, Op.PREFETCH, copies.prefetches)],
            [_copies(copies, Op.OFFLOAD, copies.offloads)],
        ]
        if pauses:
            blocks = _around_pause(blocks, num_forwards(index, rank), links)
        programs.append(Program(rank, InstructionColumns(_in_order(blocks), links)))
    step = ProgramIndex(
        replace(plan, placement=schedule.placement, num_microbatches=schedule.num_microbatches), programs
    )
    return tuple(
        Program(rank, with_slots(with_due(step, rank), buffered, stages_of_link))
        for rank in range(schedule.num_ranks)
    )


@dataclass(frozen=True)
class _Traffic:
    """Messages, and the positions of the producer and the reader of each.

    Positions count the computes of a rank from 1. Position 0 is the start of its program, where weights are
    sent. The position after the last compute is the end, where messages are sent that are read after the
    program.
    """

    index: ScheduleIndex
    links: Sequence[Link]
    messages: Messages
    producers: Ints
    readers: Ints

    @classmethod
    def of(cls, index: ScheduleIndex, links: Sequence[Link], pauses: bool) -> Self:
        """The messages of a schedule. If it ``pauses``, results are sent after the last forward."""
        schedule, lengths = index.schedule, np.array([len(each) for each in index.computes], np.int32)
        found = messages(links, schedule.placement, schedule.num_microbatches)
        made, read = lengths[found.sources] + 1, lengths[found.targets] + 1
        bounds = np.searchsorted(found.links, range(len(links) + 1))
        for link, first, last in zip(links, bounds, bounds[1:], strict=False):
            own, payload = slice(first, last), link.payload
            if payload.per_microbatch:
                sent = found.microbatches[own]
                made[own] = index.positions_of(link, payload.producers, link.source)[sent]
                if payload.feeds_compute:
                    read[own] = index.positions_of(link, payload.readers, link.target)[sent]
                else:
                    read[own] += 1
            elif payload is Payload.WEIGHT:
                positions = index.positions_of(link, payload.readers, link.target)
                made[own] = 0
                targets, ranks = found.targets[own].tolist(), index.ranks[link.target]
                read[own] = [positions[ranks == target].min() for target in targets]
            elif payload is Payload.RESULT and pauses:
                forwards = np.array([num_forwards(index, rank) for rank in range(schedule.num_ranks)])
                made[own], read[own] = forwards[found.sources[own]], forwards[found.targets[own]] + 2
            else:
                read[own] += _AFTER_UNSHARD if payload.is_result else 1
        return cls(index, links, found, made, read)

    def by_rank(self, ranks: Ints) -> Sequence[Ints]:
        """The numbers of the messages of each rank: of those with this source or target."""
        order, _ = stable_order(ranks)
        return np.split(order, np.searchsorted(ranks[order], range(1, self.index.schedule.num_ranks)))

    @cached_property
    def feeds(self) -> Bools:
        """Which messages a compute reads for a microbatch."""
        feeding = np.array([link.payload.feeds_compute for link in self.links], bool)
        return feeding[self.messages.links]

    def tasks(self, ranks: Ints, positions: Ints, which: Ints) -> Ints:
        """The computes at these positions of ranks, of the messages ``which``."""
        firsts = np.array(self.index.first_tasks, np.int32)
        return firsts[ranks[which]] + positions[which] - 1

    def depend_on_compute_before_reader(self, dependence: Dependence) -> Bools:
        """Whether each message can be made only after the compute before its reader has ended."""
        depends = np.zeros(self.readers.size, bool)
        own = np.flatnonzero(self.feeds & (self.readers > 1))
        made = self.tasks(self.messages.sources, self.producers, own)
        depends[own] = dependence.depends_on(made, self.tasks(self.messages.targets, self.readers, own) - 1)
        return depends


@dataclass(frozen=True)
class _UnitOrder:
    """The run of all computes in units of time.

    ``ends`` has, for each rank, the end of each of its positions, from the start of its program to its end.
    """

    dependence: Dependence
    ends: Sequence[Floats]


def _unit_order(
    index: ScheduleIndex,
    traffic: _Traffic,
    rounds: Sequence[update_boundaries.UpdateBoundary],
    plan: Plan,
) -> _UnitOrder:
    own = np.flatnonzero(traffic.feeds)
    readers = [traffic.tasks(traffic.messages.targets, traffic.readers, own)]
    producers = [traffic.tasks(traffic.messages.sources, traffic.producers, own)]
    for later, earlier in (update_boundaries.version_reads(index, rounds), loss_reads(index, plan)):
        readers.append(later)
        producers.append(earlier)
    reads = TaskInputs(np.concatenate(readers), np.concatenate(producers))
    run = run_tasks(_units(index), reads, index.first_tasks)
    if isinstance(run, Deadlock):
        raise VerifyError(index.explain_stuck(run.tasks))
    padded = []
    for rank in range(index.schedule.num_ranks):
        first, last = index.first_tasks[rank : rank + 2]
        ended = run.ends[first:last]
        padded.append(np.concatenate([[0.0], ended, ended[-1:] if ended.size else [0.0]]))
    return _UnitOrder(Dependence(index.first_tasks, run), padded)


def _units(index: ScheduleIndex) -> Floats:
    """The duration of each compute. In an asynchronous schedule, stages count as equally fast whatever their
    number of replicas.
    """
    schedule = index.schedule
    phases = np.concatenate([computes.phases for computes in index.computes])
    units: Floats = np.where(phases == PHASE_CODE[Phase.BACKWARD], 2.0, 1.0) / np.concatenate(index.counts)
    if schedule.stream:
        stages = np.concatenate([computes.stages for computes in index.computes])
        units *= np.array(replica_counts(schedule.placement))[stages]
    return units


_Block = tuple[Ints, InstructionColumns]
"""Instructions of one kind, and the positions that they belong to."""


def _block(positions: Ints, *fields: Ints | int) -> _Block:
    """Instructions with these first fields: a number for each, or the same for all; the others are -1."""
    every = (*fields, *(-1,) * (NUM_COLUMNS - len(fields)))
    columns = (
        constant(each, positions.size) if isinstance(each, int) else np.asarray(each, np.int32)
        for each in every
    )
    return positions, InstructionColumns(columns, ())


def _phases_with(effect: str) -> Bools:
    """For each code of a phase, whether its op has an effect."""
    return np.array([effect in Op(phase).traits.effects.split() for phase in Phase])


_MAKES_GRADIENTS, _NEEDS_FORWARD = _phases_with("gradients.make"), _phases_with("recomputed.read")
_AFTER_UNSHARD = 3
"""The positions from the end of the computes to the wait for results: weights are gathered before it."""

_NOTHING = _block(np.empty(0, np.int32))


def _joined(blocks: Sequence[_Block]) -> _Block:
    positions, columns = zip(*blocks, strict=True)
    return np.concatenate(positions), concatenate_instructions(columns)


def _in_order(kinds: Sequence[Iterable[_Block]]) -> list[Ints]:
    """The columns of all blocks, sorted by position and then by kind. The sort is stable."""
    blocks = [
        (positions * len(kinds) + number, columns)
        for number, kind in enumerate(kinds)
        for positions, columns in kind
    ]
    positions, joined = _joined(blocks)
    order = np.argsort(positions, kind="stable")
    return [taken(compact(column), order) for column in joined.columns]


_AT_PAUSE, _BEFORE_PAUSE = one_of(Op.PAUSE, Op.AVERAGE_BUFFERS), one_of(Op.WAIT_OFFLOAD)
_BEHIND_PAUSE = one_of(Op.PREFETCH)


def _pause(forwards: int) -> _Block:
    """The pause of a rank, behind its forwards."""
    return _block(np.array([forwards], np.int32), OP_CODE[Op.PAUSE])


def _around_pause(
    kinds: Sequence[Iterable[_Block]], forwards: int, links: Sequence[Link]
) -> list[Iterable[_Block]]:
    """The kinds of blocks with a position for the pause between that of the last forward and the next one.

    Results, and whatever else forwards have started, are complete before the pause.
    """
    pause, is_result = 2 * forwards + 1, np.array([*(x.payload is Payload.RESULT for x in links), False])

    def moved(positions: Ints, columns: InstructionColumns) -> Ints:
        ops, twice = columns.ops, 2 * positions.astype(np.int64)
        twice = np.where(_BEFORE_PAUSE[ops], np.minimum(twice, pause), twice)
        twice = np.where(_BEHIND_PAUSE[ops], np.maximum(twice, pause), twice)
        return np.where(_AT_PAUSE[ops] | is_result[columns.link_numbers], pause, twice)

    return [[(moved(*block), block[1]) for block in kind] for kind in kinds]


def _receives(
    traffic: _Traffic,
    order: _UnitOrder,
    rank: int,
    arriving: Ints,
    depends: Bools,
    sums: Sequence[tuple[float, SyncOp]],
) -> _Block:
    """The receives of ``rank``, each at the position where it is posted, in the order of the sends.

    Between them are the rank's ``sums`` of rounds, in the order in which they begin. So waiting for a later
    one, as a script does for results, does not delay an earlier one.

    A receive is posted at the position that the rank has reached when the message is sent, or one position
    before its reader if that is earlier and the message does not depend on the compute there. Only weights
    are received at position 0, where the rank sends its own weights to borrowers.
    """
    found = traffic.messages
    arriving = arriving[found.sources[arriving] != rank]
    by_channel = np.lexsort((traffic.producers[arriving], found.sources[arriving]))
    own = arriving[by_channel]
    sources, made, links = found.sources[own], traffic.producers[own], found.links[own]
    sent = np.empty(own.size)
    for source in np.unique(sources).tolist():
        sent[sources == source] = order.ends[source][made[sources == source]]
    passed, is_lower = np.empty(own.size, np.int64), sources < rank
    passed[is_lower] = np.searchsorted(order.ends[rank], sent[is_lower], "left")
    passed[~is_lower] = np.searchsorted(order.ends[rank], sent[~is_lower], "right")
    ahead = np.where(made > 0, np.maximum(traffic.readers[own] - ~depends[own], 1), 0)
    posts = np.minimum(passed, ahead)
    channel = sources * np.int64(len(order.ends[rank]) + 1)
    posts = np.minimum.accumulate((posts + channel)[::-1])[::-1] - channel  # in the order of the sends
    targets = np.array([link.target for link in traffic.links], np.int32)
    fields = OP_CODE[Op.RECV], targets[links], found.microbatches[own], links, sources
    blocks = [_sync_ops([each for _, each in sums], rank), _block(posts.astype(np.int32), *fields)]
    times = np.concatenate([np.array([time for time, _ in sums], float), sent])
    order_of_sends = np.argsort(times, kind="stable")
    positions, columns = _joined(blocks)
    return positions[order_of_sends], columns.taken(order_of_sends)


def _sends(traffic: _Traffic, leaving: Ints) -> _Block:
    """The sends and moves of a rank, each directly after the compute that makes its values."""
    found, links = traffic.messages, traffic.messages.links[leaving]
    is_move = found.sources[leaving] == found.targets[leaving]
    ends = np.array([(link.source, link.target) for link in traffic.links], np.int32).reshape(-1, 2)
    return _block(
        traffic.producers[leaving],
        np.where(is_move, OP_CODE[Op.MOVE], OP_CODE[Op.SEND]).astype(np.int32),
        np.where(is_move, ends[links, 1], ends[links, 0]),
        found.microbatches[leaving],
        links,
        np.where(is_move, np.int32(-1), found.targets[leaving]),
    )


def _computes(index: ScheduleIndex, rank: int, versions: Ints) -> _Block:
    """The computes of a rank. ``versions[stage, microbatch]`` is the version of the weights they read."""
    computes = index.computes[rank]
    ops = np.array([OP_CODE[Op(phase)] for phase in Phase], np.int32)[computes.phases]
    positions = np.arange(1, len(computes) + 1, dtype=np.int32)
    read = entries(versions, computes.stages, computes.microbatches)
    same = computes.stages, computes.microbatches, -1, -1, -1, -1, index.segments[rank], -1, read
    return _block(positions, ops, *same)


def _recomputes(index: ScheduleIndex, rank: int, recompute: Collection[int], versions: Ints) -> _Block:
    """The replays of the forward, before each backward of the stages in ``recompute``."""
    if not recompute:
        return _NOTHING
    computes, segments = index.computes[rank], index.segments[rank]
    replays = np.isin(computes.stages, list(recompute)) & _NEEDS_FORWARD[computes.phases]
    own = np.flatnonzero(replays & (segments <= 0))
    stages, microbatches = computes.stages[own], computes.microbatches[own]
    op, read = OP_CODE[Op.RECOMPUTE], entries(versions, stages, microbatches)
    positions = (own + 1).astype(np.int32)
    return _block(positions, op, stages, microbatches, -1, -1, -1, -1, -1, -1, read)


def _accumulates(index: ScheduleIndex, rank: int) -> _Block:
    """The accumulation of gradients, after each compute that makes some."""
    computes = index.computes[rank]
    own = np.flatnonzero(_MAKES_GRADIENTS[computes.phases])
    same = computes.stages[own], computes.microbatches[own], -1, -1, -1, -1, index.segments[rank][own]
    return _block((own + 1).astype(np.int32), OP_CODE[Op.ACCUMULATE], *same)


def _sync_ops(own: Sequence[SyncOp], rank: int, *kinds: OpKind) -> _Block:
    """Those collectives, updates or releases of a rank that are of these kinds, or all without ``kinds``.

    An update in host memory stands where updates do.
    """
    if kinds:
        kind_of = {each.op: each.op.traits.kind for each in own} | {Op.HOST_UPDATE: OpKind.STEP_COMPUTE}
        own = [each for each in own if kind_of[each.op] in kinds]
    if not own:
        return _NOTHING
    positions = np.array([each.positions[rank] for each in own], np.int32)
    columns = [(OP_CODE[x.op], x.stage, x.microbatch, -1, -1, -1, x.bucket, -1, -1, x.version) for x in own]
    return _block(positions, *np.array(columns, np.int32).reshape(-1, NUM_COLUMNS).T)


def _model_collectives(
    index: ScheduleIndex, rank: int, model_collectives: ModelCollectives
) -> Iterator[_Block]:
    """The model collectives of a rank, each before the segment that reads its result."""
    computes, segments = index.computes[rank], index.segments[rank]
    for stage, of_stage in model_collectives.items():
        for number, collective in enumerate(of_stage):
            of_phase = (computes.stages == stage) & (computes.phases == PHASE_CODE[collective.phase])
            own = np.flatnonzero(of_phase & (segments == collective.segment))
            positions = (own + 1).astype(np.int32)
            microbatches = computes.microbatches[own]
            op = OP_CODE[collective.op]
            yield _block(positions, op, stage, microbatches, -1, -1, -1, -1, -1, number)


def _copies(copies: OffloadIntervals, op: Op, positions: Ints) -> _Block:
    """The copies to host memory and back, or the waits for them."""
    return _block(positions, OP_CODE[op], copies.stages, copies.microbatches)


def _frees(index: ScheduleIndex, rank: int) -> Iterator[_Block]:
    """A free after the last compute of each stage and microbatch."""
    for stage in stages_on(index.schedule.placement, rank):
        last = index.lasts[:, stage].max(axis=0) * (index.ranks[stage] == rank)
        microbatches = np.flatnonzero(last).astype(np.int32)
        yield _block(last[microbatches], OP_CODE[Op.FREE], stage, microbatches)
