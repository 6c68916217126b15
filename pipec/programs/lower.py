"""Lowering: from a compute-only schedule to the program of each rank, with communication, buffers and frees.

The positions of all ranks are put into one linear order: that in which their cells end when forward,
input gradient and weight gradient take one unit of time each and messages take none. A message is sent
right after the cell that makes it, and its receive is posted no later in that order. Whatever an
instruction waits for thus comes before it in one order over all ranks, so the programs cannot deadlock,
not even if every send waited for its receive.

Receives are posted one compute earlier where that rule alone would post them directly before their
reader, because a transfer runs beside a compute only if its receive was posted before the compute began.
On each directed channel between two ranks receives are posted in the order of the sends.

Everything is worked out on columns of numbers, a rank or a link at a time: a step may have millions of
instructions.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipec.errors import VerifyError
from pipec.ir import Link, Op, Payload, Phase, Program, Schedule, Value
from pipec.ir.columns import OP_CODE, PHASE_CODE, Instructions, Ints
from pipec.programs.buffer_slots import number_slots
from pipec.programs.order_index import OrderIndex
from pipec.programs.timing import Deadlock, Reads, run_cells


def chain_links(num_stages: int, training: bool = True) -> tuple[Link, ...]:
    """A plain chain of stages: ``hidden_k`` goes into stage k; in training ``grad_hidden_k`` comes back."""

    def value(name: str) -> tuple[Value, ...]:
        return (Value(name, "float32", ("b",)),)

    forward = [Link(k - 1, k, Payload.ACTIVATION, value(f"hidden_{k}")) for k in range(1, num_stages)]
    backward = [Link(k, k - 1, Payload.GRADIENT, value(f"grad_hidden_{k}")) for k in range(1, num_stages)]
    return (*forward, *backward) if training else tuple(forward)


def lower(schedule: Schedule, links: Sequence[Link], recompute: Collection[int] = ()) -> tuple[Program, ...]:
    """One program per rank: ``schedule`` with the communication that ``links`` ask for.

    Weights are lent first, then comes the work of the microbatches; weight gradients and results leave
    when their rank has computed its last cell. Stages in ``recompute`` replay their forward directly
    before the backward, or its input half, of each microbatch.

    Raises:
        VerifyError: a cell is missing, doubled or on the wrong rank, or cells wait for each other.
    """
    index = OrderIndex(schedule)
    traffic = list(_traffic(index, links))
    ends = _ends(index, traffic)
    arriving: dict[int, list[_Traffic]] = defaultdict(list)
    leaving: dict[int, list[_Traffic]] = defaultdict(list)
    for each in traffic:
        leaving[each.source].append(each)
        if each.crosses_ranks:
            arriving[each.target].append(each)
    per_microbatch = np.array([*(link.payload.per_microbatch for link in links), False])
    programs = []
    for rank in range(schedule.num_ranks):
        receives = _receives(ends, rank, arriving[rank])
        computes, frees = _computes(index, rank, recompute), _frees(index, rank)
        rows = _in_order([receives, computes, _sends(leaving[rank]), frees])
        number_slots(rows, buffered=per_microbatch)
        programs.append(Program(rank, Instructions(rows, tuple(links))))
    return tuple(programs)


@dataclass(frozen=True)
class _Traffic:
    """What one link carries from one rank to another in a step: a column entry for each message.

    Positions count the cells of a rank from 1. 0 is the start of its program, where weights leave, and the
    one after its last cell the end, where messages that are read when the program is over leave.
    """

    number: int
    link: Link
    source: int
    target: int
    microbatches: Ints
    producers: Ints
    readers: Ints

    @property
    def crosses_ranks(self) -> bool:
        return self.source != self.target


def _traffic(index: OrderIndex, links: Sequence[Link]) -> Iterator[_Traffic]:
    schedule = index.schedule
    once = np.array([-1], np.int32)
    for number, link in enumerate(links):
        source = schedule.placement[link.source]
        producers, readers = link.payload.producers, link.payload.readers
        if link.payload.per_microbatch:
            made = index.positions_of(link, producers, link.source)
            read = index.positions_of(link, readers, link.target)
            microbatches = np.arange(schedule.num_microbatches, dtype=np.int32)
            yield _Traffic(number, link, source, schedule.placement[link.target], microbatches, made, read)
        elif link.payload is Payload.WEIGHT:
            first = index.positions_of(link, readers, link.target).min(keepdims=True)
            yield _Traffic(number, link, source, schedule.placement[link.target], once, 0 * first, first)
        else:
            everyone_else = [rank for rank in range(schedule.num_ranks) if rank != source]
            result = link.payload is Payload.RESULT
            for target in everyone_else if result else [schedule.placement[link.target]]:
                last, over = (np.array([index.length(rank) + 1], np.int32) for rank in (source, target))
                yield _Traffic(number, link, source, target, once, last, over + 1)


def _ends(index: OrderIndex, traffic: Sequence[_Traffic]) -> list[Ints]:
    """When each position of each rank ends, its start and its end included."""
    read = [each for each in traffic if each.link.payload.per_microbatch]
    nothing = np.empty(0, np.int32)
    readers = [index.cell_numbers(each.target, each.readers) for each in read]
    producers = [index.cell_numbers(each.source, each.producers) for each in read]
    phases = np.concatenate([cells.phases for cells in index.cells])
    units = np.where(phases == PHASE_CODE[Phase.BACKWARD], 2.0, 1.0)
    reads = Reads(np.concatenate([nothing, *readers]), np.concatenate([nothing, *producers]))
    run = run_cells(units, reads, index.first_cells)
    if isinstance(run, Deadlock):
        raise VerifyError(index.explain_stuck(run.cells))
    padded = []
    for rank in range(index.schedule.num_ranks):
        first, last = index.first_cells[rank : rank + 2]
        own = run.ends[first:last]
        padded.append(np.concatenate([[0], own, own[-1:] if own.size else [0]]).astype(np.int32))
    return padded


_NUM_CLASSES = 4
"""At each position come receives, then computes, then sends and moves, then frees."""


@dataclass(frozen=True)
class _Block:
    """Instructions of one class: the positions they belong to, and their columns."""

    positions: Ints
    rows: Ints


def _block(positions: Ints, *columns: Ints | int) -> _Block:
    rows = np.empty((6, positions.size), np.int32)
    for row, column in zip(rows, columns, strict=True):
        row[:] = column
    return _Block(positions, rows)


def _joined(blocks: Sequence[_Block]) -> _Block:
    if not blocks:
        return _block(np.empty(0, np.int32), -1, -1, -1, -1, -1, -1)
    return _Block(
        np.concatenate([each.positions for each in blocks]),
        np.concatenate([each.rows for each in blocks], axis=1),
    )


def _in_order(classes: Sequence[_Block]) -> Ints:
    """The rows of all classes, by position and class, otherwise in the order they are in."""
    keys = [block.positions * _NUM_CLASSES + number for number, block in enumerate(classes)]
    order = np.argsort(np.concatenate(keys), kind="stable")
    return np.ascontiguousarray(_joined(classes).rows[:, order])


def _receives(ends: Sequence[Ints], rank: int, arriving: Sequence[_Traffic]) -> _Block:
    """What ``rank`` receives, posted where it has come when the message is sent.

    Or before the position before the reader if that is earlier; only weights are received before the
    weights that the rank lends. In the order of the sends, so that each channel keeps its order.
    """
    blocks, order = [], []
    for each in arriving:
        sent = ends[each.source][each.producers]
        passed = np.searchsorted(ends[rank], sent, "right" if rank < each.source else "left")
        ahead = np.where(each.producers > 0, np.maximum(each.readers - 1, 1), 0)
        posts = np.minimum(passed, ahead).astype(np.int32)
        stage = each.link.target
        blocks.append(_block(posts, OP_CODE[Op.RECV], stage, each.microbatches, each.number, each.source, -1))
        order.append(
            np.stack([np.full_like(posts, each.number), each.producers, posts * 0 + each.source, sent])
        )
    joined = _joined(blocks)
    if not blocks:
        return joined
    sorted_by_send = np.lexsort(np.concatenate(order, axis=1))
    positions, rows = joined.positions[sorted_by_send], joined.rows[:, sorted_by_send]
    for source in {each.source for each in arriving}:
        channel = np.flatnonzero(rows[4] == source)
        positions[channel] = np.minimum.accumulate(positions[channel][::-1])[::-1]
    return _Block(positions, rows)


def _sends(leaving: Sequence[_Traffic]) -> _Block:
    """What a rank sends or moves, each directly after the cell that makes it."""
    blocks = []
    for each in leaving:
        if each.crosses_ranks:
            op, stage, peer = Op.SEND, each.link.source, each.target
        else:
            op, stage, peer = Op.MOVE, each.link.target, -1
        blocks.append(_block(each.producers, OP_CODE[op], stage, each.microbatches, each.number, peer, -1))
    return _joined(blocks)


def _computes(index: OrderIndex, rank: int, recompute: Collection[int]) -> _Block:
    """The cells of a rank, the backwards of stages in ``recompute`` each after a replay of its forward."""
    cells = index.cells[rank]
    ops = np.array([OP_CODE[Op(phase)] for phase in Phase], np.int32)[cells.phases]
    positions = np.arange(1, len(cells) + 1, dtype=np.int32)
    computes = _block(positions, ops, cells.stages, cells.microbatches, -1, -1, -1)
    needs_forward = np.isin(cells.phases, [PHASE_CODE[Phase.BACKWARD], PHASE_CODE[Phase.BACKWARD_INPUT]])
    replayed = np.flatnonzero(np.isin(cells.stages, list(recompute)) & needs_forward)
    replays = _Block(positions[replayed], computes.rows[:, replayed])
    replays.rows[0] = OP_CODE[Op.RECOMPUTE]
    return _joined([replays, computes])


def _frees(index: OrderIndex, rank: int) -> _Block:
    """A free after the last cell of each stage and microbatch."""
    blocks = []
    for stage in index.stages_of(rank):
        last = index.positions[:, stage].max(axis=0)
        microbatches = np.flatnonzero(last).astype(np.int32)
        blocks.append(_block(last[microbatches], OP_CODE[Op.FREE], stage, microbatches, -1, -1, -1))
    return _joined(blocks)
