"""The rule of cells: what is read has been made, and what is made is awaited, used and freed, each once."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from pipec.ir import Op, Payload
from pipec.ir.columns import Ints
from pipec.ir.program import CELLS
from pipec.programs.cell_accesses import RankCells
from pipec.programs.lives import AT_START, Accesses, Life
from pipec.programs.messages import once_peers
from pipec.programs.program_index import ProgramIndex, Violation, describe


def lives_are_complete(step: ProgramIndex) -> Iterator[Violation]:
    """Every cell has the life that ``CELLS`` says, and the cells that the plan demands have one. Refused::

    wait_recv stage 1 mb 0, recv stage 1 mb 0, forward stage 1 mb 0
    """
    for rank in range(len(step.columns)):
        cells = RankCells(step, rank, step.columns[rank])
        accessed, messages = {cell: (life, own) for cell, life, own in cells.lives()}, _due_messages(cells)
        for cell in sorted(CELLS, key=lambda cell: CELLS[cell][0] not in _ONCE):
            fields, _, events = CELLS[cell]
            if events and cells.exists(cell):
                due = _DUE[fields](cells, cell) if fields in _DUE else messages.get(cell, _NOTHING)
                life, own = accessed.get(cell, (cells.life(cell), None))
                yield from _missing(cells, cell, life, own, due)
        for cell, (life, found) in accessed.items():
            for place, before in found.violations(life):
                site = rank, max(found.position(place), 0)
                yield Violation(site, _explain(cells, cell, life, found, place, before))


def _explain(cells: RankCells, cell: str, life: Life, own: Accesses, place: int, before: int) -> str:
    """What is wrong with an event that may not follow the one before, or is the last."""

    def name(place: int) -> str:
        position = own.position(place)
        return describe(cells.columns[position]) if position > AT_START else f"the first {cell}"

    def ops(events: Sequence[int]) -> str:
        found = (op for event in events for op in _causes(cells, cell, life.events[event]))
        return " or ".join(dict.fromkeys(found))

    event = int(own.events[place])
    if place == before:
        missing = life.missing_behind(event)
        is_unread = [life.events[each] for each in missing] == ["read"]
        text = "is not read" if is_unread else f"has no {ops(missing)} behind it"
        return f"{name(place)} {text}; {_pattern(cell)}"
    previous = int(own.events[before]) if before >= 0 else len(life.events)
    if missing := life.missing_before(previous, event):
        same = np.flatnonzero((own.keys == own.keys[place]) & np.isin(own.events, missing))
        later = same[same > place]
        if later.size:
            text = f"runs before {name(int(later[0]))} at {own.position(int(later[0]))}"
        else:
            text = f"has no {ops(missing)} before it"
    elif event == previous:
        text = f"is there again; the first is at {own.position(before)}"
    else:
        text = f"comes after {name(before)} at {own.position(before)}"
    return f"{name(place)} {text}; {_pattern(cell)}"


def _pattern(cell: str) -> str:
    return f"expected of {cell.replace('_', ' ')}: {CELLS[cell][1]}"


def _causes(cells: RankCells, cell: str, event: str) -> list[str]:
    """The ops that cause an event, in a step that loads weights or not, and has replicas or not."""
    loaded = [bucket.on_host for bucket in cells.sync_spec.buckets]
    others = (*(() if any(loaded) else _ON_HOST), *(_WITH_REPLICAS if loaded and all(loaded) else ()))
    causing = (op for op in Op if op not in others)
    return [op for op in causing if (cell, event) in [each[:2] for each in op.traits.effect_parts]]


_ON_HOST = (Op.LOAD, Op.WAIT_LOAD, Op.STORE, Op.WAIT_STORE, Op.HOST_UPDATE)
_WITH_REPLICAS = (Op.UNSHARD, Op.WAIT_UNSHARD, Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD)


_NOTHING = np.empty(0, np.int64)
_ONCE = ("stage", "bucket", "")
"""The fields that name cells of a whole step."""


def _due_microbatches(cells: RankCells, cell: str) -> Ints:
    own = [
        np.flatnonzero(cells.step.ranks[stage] == cells.rank) + stage * cells.size
        for stage in cells.stages
        if cells.exists(cell, stage)
    ]
    return np.concatenate([_NOTHING, *own])


def _due_buckets(cells: RankCells, cell: str) -> Ints:
    """Buckets, each as often as it is reduced."""
    spec, plan, found = cells.sync_spec, cells.step.plan, list[int]()
    for number, bucket in enumerate(spec.buckets):
        if bucket.stage in cells.stages and cells.exists(cell, number):
            rounds = -(-plan.num_microbatches // len(plan.placement[bucket.stage]))
            often = rounds if cell == "reduction" and spec.reduces_every_round(bucket) else 1
            found += [number] * often
    return np.array(found, np.int64)


def _due_rounds(cells: RankCells, cell: str) -> Ints:
    rounds = [
        cells.round_keys(stage, np.arange(-(-cells.step.plan.num_microbatches // cells.round_sizes[stage])))
        for stage in cells.stages
    ]
    return np.concatenate([_NOTHING, *rounds])


def _due_collectives(cells: RankCells, cell: str) -> Ints:
    """The model collectives of the microbatches of a rank."""
    columns, found = cells.columns, [_NOTHING]
    for stage in cells.stages:
        for number, each in enumerate(cells.step.model_collectives(stage)):
            own = columns.numbers_of(Op(each.phase))
            own = own[(columns.stages[own] == stage) & (columns.segments[own] <= 0)]
            keys = stage * cells.size + np.unique(columns.microbatches[own])
            found.append(keys * cells.most_collectives + number)
    return np.concatenate(found)


_DUE: Mapping[str, Callable[[RankCells, str], Ints]] = {
    "stage microbatch": _due_microbatches,
    "stage microbatch model_collective": _due_collectives,
    "stage": lambda cells, cell: np.array([x for x in cells.stages if cells.exists(cell, x)], np.int64),
    "bucket": _due_buckets,
    "": lambda cells, cell: np.zeros(1, np.int64),
    "round bucket": _due_rounds,
}
"""By the fields that name a cell, the keys of those that the plan demands of a rank."""


def _due_messages(cells: RankCells) -> Mapping[str, Ints]:
    """The messages that the plan lets a rank send and receive."""
    step, plan, rank = cells.step, cells.step.plan, cells.rank
    parts = defaultdict[str, list[Ints]](list)
    sent: Ints
    received: Ints
    every = np.arange(plan.num_microbatches, dtype=np.int32)
    for number in step.links_at(cells.stages, results=True):
        link, numbers = plan.links[number], np.array([number])
        if link.payload.feeds_compute:
            made, read = step.ranks[link.source] == rank, step.ranks[link.target] == rank
            sent, received = np.flatnonzero(made & ~read), np.flatnonzero(read)
            targets, sources = step.ranks[link.target][sent], np.full_like(received, -1)
        elif link.payload is Payload.MICROBATCH_RESULT:
            made = step.ranks[link.source] == rank
            others = np.delete(np.arange(len(step.columns)), rank)
            sent, targets = every[made].repeat(others.size), np.tile(others, int(made.sum()))
            received, sources = every[~made], step.ranks[link.source][~made]
        else:
            targets, sources = once_peers(link, plan.placement, plan.num_microbatches, rank)
            targets, sources = targets[targets != rank], np.where(sources == rank, -1, sources)
            sent, received = np.full_like(targets, -1), np.full_like(sources, -1)
        cell = "returned" if link.payload is Payload.WEIGHT_GRADIENT else "message"
        parts[cell].append(cells.received_keys(numbers, received, sources))
        parts["sent"].append(cells.message_keys(number, sent, targets))
    return {cell: np.concatenate(keys) for cell, keys in parts.items()}


def _missing(cells: RankCells, cell: str, life: Life, own: Accesses | None, due: Ints) -> Iterator[Violation]:
    """Cells that the plan demands, and no instruction makes, or not as often."""
    fields, _, events = CELLS[cell]
    codes = [life.events.index(event) for event in events.split()]
    is_once = fields in _ONCE
    if not is_once and (own.count(codes) if own else 0) == due.size:
        return
    keys, counts = np.unique(due, return_counts=True)
    made = np.sort(own.keys[np.isin(own.events, codes)] if own else _NOTHING)
    found = np.searchsorted(made, keys, "right") - np.searchsorted(made, keys)
    for place in np.flatnonzero((found < counts) | is_once & (found > counts))[:1].tolist():
        stage, microbatch, where = cells.place_of(cell, int(keys[place]))
        site = cells.step.probable_site(cells.rank, stage, microbatch)
        ops = " or ".join(op for event in events.split() for op in _causes(cells, cell, event))
        often = "once" if counts[place] == 1 else f"{counts[place]} times"
        how = f"is there {found[place]} times" if is_once else "is missing"
        yield Violation(site, f"{ops}{where} {how} on rank {cells.rank}; expected {often}")
