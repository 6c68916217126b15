"""Adds to a program what the effects of its instructions demand, where the table of cells says it is due.

A wait ends what another instruction has started. In the life of each cell that it changes, such as ``recv
wait read*``, some events may only come later: it is due directly before the first of these, or at the end of
the program. What is made for a reader is due directly before the first one: what is computed once of weights,
and the request of a mini-batch. For example, with gathered weights and clipped gradients::

    unshard      stage 0  bucket 0              unshard           stage 0  bucket 0
    forward      stage 1  mb 0                  forward           stage 1  mb 0
    forward      stage 0  mb 0          ->      wait_unshard      stage 0  bucket 0
    ...                                         precompute        stage 0
    reduce_grad  stage 0  bucket 0              forward           stage 0  mb 0
    backward     stage 1  mb 3                  ...
    grad_norm                                   reduce_grad       stage 0  bucket 0
    update       stage 0                        backward          stage 1  mb 3
                                                wait_reduce_grad  stage 0  bucket 0
                                                grad_norm
                                                update            stage 0
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipec.ir import WAIT_OF, Instruction, Op
from pipec.ir.columns import OP_CODE, OPS, InstructionColumns, Ints, insert_instructions, taken
from pipec.programs.cell_accesses import Access, RankCells
from pipec.programs.program_index import ProgramIndex

_ENDS: Mapping[Op, Sequence[Op]] = {
    **{op: (wait,) for op, wait in WAIT_OF.items() if op is not Op.OFFLOAD},
    Op.RECV: (Op.WAIT_RECV, Op.ACCUMULATE),
}
"""The instructions that end what an op has started. A copy to the host is awaited to free memory: its wait
has a place of its own."""

_WAITS = np.array([OP_CODE[WAIT_OF.get(op, op)] for op in OPS], np.int32)


def with_due(step: ProgramIndex, rank: int) -> InstructionColumns:
    """The program of a rank of ``step`` with all that is due.

    A stream awaits results last: before the script requests another mini-batch, or an update reads them.
    """
    cells = RankCells(step, rank, step.columns[rank])
    cells = replace(cells, columns=_with_waits(cells, of_results=False))
    if cells.stream or any(step.plan.stages[stage].precomputed_phases for stage in cells.stages):
        cells = replace(cells, columns=_with_preparations(cells))
    return _with_waits(cells, of_results=True) if cells.stream else cells.columns


def _with_waits(cells: RankCells, *, of_results: bool) -> InstructionColumns:
    """The program with the waits for results of microbatches, or for everything else.

    Of several at one place, those for copies and model collectives come first, then those for messages in the
    order of links, then those for collectives and for gradients of tied weights, which are accumulated.
    """
    columns, step = cells.columns, cells.step
    is_result, is_tied = (step.links_with(kind) for kind in ("microbatch_result", "weight_gradient"))
    started = dict[Op, Ints]()
    for op in columns.numbers_by_op.keys() & _ENDS.keys():
        own = columns.numbers_of(op)
        if (own := own[is_result[taken(columns.link_numbers, own)] == of_results]).size:
            started[op] = own
    if not started:
        return columns
    ended = [
        (cell, cells.life(cell).later(event), keys, own)
        for op, numbers in started.items()
        for end in _ENDS[op]
        for cell, event, kind in end.traits.effect_parts
        for _, keys, own in (cells.caused(end, cell, event, kind, numbers) if event != "use" else ())
    ]
    accesses = cells.accesses({cell for cell, *_ in ended})
    places = np.full(len(columns), len(columns))
    for cell, later, keys, own in ended:
        read = [access for access in accesses[cell] if access[0] in later]
        places[own] = np.minimum(places[own], _next(read, keys, own, len(columns)))
    _limit_sums_in_transit(cells, places)
    numbers = np.sort(np.concatenate([*started.values()]))
    links = taken(columns.link_numbers, numbers)
    is_late = np.where(links < 0, taken(columns.microbatches, numbers) < 0, is_tied[links])
    numbers = numbers[np.lexsort((np.where(is_late, len(columns.links), links), places[numbers]))]
    numbers = numbers.repeat(1 + is_tied[taken(columns.link_numbers, numbers)])
    added = columns.taken(numbers)
    ends = _WAITS[added.ops]
    ends[1:][numbers[1:] == numbers[:-1]] = OP_CODE[Op.ACCUMULATE]
    return insert_instructions(
        columns, places[numbers], InstructionColumns((ends, *added.columns[1:]), columns.links)
    )


def _limit_sums_in_transit(cells: RankCells, places: Ints) -> None:
    """A sum after each round is awaited before any other begins: memory is short then.

    Gradients that are stored are awaited before the next ones are.
    """
    stores = cells.columns.numbers_of(Op.STORE)
    others = np.flatnonzero(np.diff(taken(cells.columns.stages, stores))) + 1  # the next stage's begin
    following = np.append(stores[others], len(cells.columns))
    numbers = np.searchsorted(others, np.arange(stores.size), "right")
    places[stores] = np.minimum(places[stores], following[numbers])
    sums = cells.columns.numbers_of(Op.REDUCE_GRAD)
    every_round = [cells.sync_spec.reduces_every_round(bucket) for bucket in cells.sync_spec.buckets]
    short = np.flatnonzero(np.array(every_round, bool)[cells.columns.buckets[sums[:-1]]])
    places[sums[short]] = np.minimum(places[sums[short]], sums[short + 1])


def _next(accesses: Sequence[Access], keys: Ints, numbers: Ints, size: int) -> Ints:
    """For each instruction, the first of the ``accesses`` to its cell that comes after it, or ``size``."""
    codes = [each.astype(np.int64) * size + own for _, each, own in accesses]
    ordered = np.sort(np.concatenate([*codes, [np.iinfo(np.int64).max]]))
    found = ordered[np.searchsorted(ordered, keys.astype(np.int64) * size + numbers, "right")]
    following: Ints = np.where(found // size == keys, found % size, size)
    return following


def _with_preparations(cells: RankCells) -> InstructionColumns:
    """The program with what must be made before it is read.

    A script requests one mini-batch after another. With the request for one it decides how the updates are
    made that end with it, so a rank pauses before these, and before it has the last result of a mini-batch,
    until that is requested. Before an update come what may skip or clip it, and a copy of the weights that it
    replaces, if a later compute reads them.
    """
    columns, stream = cells.columns, cells.stream
    added: list[tuple[int, Instruction]] = []
    if stream:
        added += [
            (place, Instruction(Op.PAUSE, -1, batch * stream.microbatches))
            for batch, place in _requests(cells)
        ]
        stashed = _first_reads(cells.accesses({"stashed"})["stashed"])
        for number in columns.numbers_of(Op.UPDATE).tolist():
            update = columns[number]
            if cells.sync_spec.on_nan:
                added.append((number, replace(update, op=Op.CHECK, version=-1)))
            if cells.sync_spec.clips:
                added.append((number, replace(update, op=Op.STAGE_NORM, version=-1)))
            if int(cells.version_keys(update.stage, update.version - 1)) in stashed:
                added.append((number, replace(update, op=Op.STASH, version=update.version - 1)))
    for number in _first_reads(cells.accesses({"precomputed"})["precomputed"]).values():
        read = columns[number]
        microbatch = read.microbatch if stream else -1
        added.append((number, Instruction(Op.PRECOMPUTE, read.stage, microbatch, version=read.version)))
    places, instructions = [place for place, _ in added], [each for _, each in added]
    return insert_instructions(columns, places, InstructionColumns.of(instructions, columns.links))


def _first_reads(accesses: Iterable[Access]) -> dict[int, int]:
    """By the key of each cell, the first of these instructions that read it."""
    found: dict[int, int] = {}
    for _, keys, numbers in accesses:
        for key, number in zip(keys.tolist(), numbers.tolist(), strict=True):
            found[key] = min(number, found.get(key, number))
    return dict(sorted(found.items()))


def _requests(cells: RankCells) -> Iterator[tuple[int, int]]:
    """Mini-batches, and the instruction before which each must have been requested, after those before it.

    A mini-batch that has its last result before an earlier one has it is not complete before that one.
    """
    last = cells.last_results
    is_complete = last > np.append(-1, np.maximum.accumulate(last))[: last.size]
    received = cells.caused(Op.WAIT_RECV, "request", "read", "", cells.columns.numbers_of(Op.RECV))
    reads = [*cells.accesses({"request"})["request"], *received]
    reads = [
        (event, keys[chosen], numbers[chosen])
        for event, keys, numbers in reads
        for chosen in [~np.isin(numbers, last[~is_complete])]
    ]
    first = _first_reads(reads)
    latest = np.minimum.accumulate([*first.values()][::-1])[::-1]
    yield from zip(first, latest.tolist(), strict=True)
