"""The rule of cells: what is read has been made, and what is made is awaited, used and freed, each once."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pipec.ir import Op, Payload, replica_counts
from pipec.ir.columns import Ints, constant
from pipec.ir.program import CELLS
from pipec.programs.cell_accesses import RankCells
from pipec.programs.lives import AT_START, Accesses, Life
from pipec.programs.program_index import ProgramIndex, Violation, describe


def lives_are_complete(step: ProgramIndex) -> Iterator[Violation]:
    """Every cell has the life that ``CELLS`` says, and the cells that the plan demands have one. Refused::

    wait_recv stage 1 mb 0, recv stage 1 mb 0, forward stage 1 mb 0
    """
    for rank in range(len(step.columns)):
        cells = RankCells(step, rank, step.columns[rank])
        due, accessed = _due(cells), {cell: (life, own) for cell, life, own in cells.lives()}
        for cell in CELLS:
            life, own = accessed.get(cell, (cells.life(cell), None))
            if cell in due:
                yield from _missing(cells, cell, life, own, due[cell])
            if own is not None:
                for place, before in own.violations(life):
                    site = rank, max(own.position(place), 0)
                    yield Violation(site, _explain(cells, cell, life, own, place, before))


def _explain(cells: RankCells, cell: str, life: Life, own: Accesses, place: int, before: int) -> str:
    """What is wrong with an event that may not follow the one before, or is the last."""

    def name(place: int) -> str:
        position = own.position(place)
        return describe(cells.columns[position]) if position > AT_START else f"the first {cell}"

    def ops(events: Sequence[int]) -> str:
        found = (op for event in events for op in _causes(cell, life.events[event]))
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


def _causes(cell: str, event: str) -> list[str]:
    """The ops that cause an event."""
    return [op for op in Op if (cell, event) in [each[:2] for each in op.traits.effect_parts]]


def _due(cells: RankCells) -> Mapping[str, tuple[str, Ints]]:
    """The cells that the plan demands of a rank: by their name, an event of each and their keys."""
    step, size = cells.step, cells.step.plan.num_microbatches
    own = [np.flatnonzero(step.ranks[stage] == cells.rank) + stage * size for stage in cells.stages]
    nothing = np.empty(0, np.int64)
    every = np.concatenate([nothing, *own])
    again = [each for stage, each in zip(cells.stages, own, strict=True) if stage in step.recompute]
    found = {"forward": ("make", every), "microbatch": ("free", every), **_due_messages(cells)}
    if step.trains:
        found |= {"input_gradient": ("make", every), "weight_gradient": ("make", every)}
        found["recomputed"] = "make", np.concatenate([nothing, *again])
    if cells.stream:
        replicas = replica_counts(step.plan.placement)
        sizes = [cells.stream.microbatches_per_update(stage, replicas) for stage in cells.stages]
        rounds = [
            cells.round_keys(stage, np.arange(-(-step.plan.num_microbatches // count)))
            for stage, count in zip(cells.stages, sizes, strict=True)
        ]
        found["round"] = "update", np.concatenate([nothing, *rounds])
    if any(stage in step.model_collectives for stage in cells.stages):
        found["collective"] = "read", _due_collectives(cells)
    return found


def _due_collectives(cells: RankCells) -> Ints:
    """The model collectives of the microbatches of a rank."""
    columns, found = cells.columns, [np.empty(0, np.int64)]
    for stage in cells.stages:
        for number, each in enumerate(cells.step.model_collectives.get(stage, ())):
            own = columns.numbers_of(Op(each.phase))
            own = own[(columns.stages[own] == stage) & (columns.segments[own] <= 0)]
            keys = stage * cells.size + np.unique(columns.microbatches[own])
            found.append(keys * cells.most_collectives + number)
    return np.concatenate(found)


def _due_messages(cells: RankCells) -> Mapping[str, tuple[str, Ints]]:
    """The messages that the plan lets a rank send and receive."""
    parts = defaultdict[str, list[Ints]](list)
    for route in cells.step.routes_by_rank[cells.rank]:
        numbers = constant(route.number, route.microbatches.size)
        if route.target == cells.rank:
            is_returned = route.link.payload is Payload.WEIGHT_GRADIENT
            peer = route.source if route.crosses_ranks else -1
            parts["returned" if is_returned else "message"].append(
                cells.received_keys(numbers, route.microbatches, constant(peer, numbers.size))
            )
        if route.source == cells.rank and route.crosses_ranks:
            peers = constant(route.target, numbers.size)
            parts["sent"].append(cells.message_keys(numbers, route.microbatches, peers))
    events = {"message": "recv move", "returned": "recv move", "sent": "send"}
    return {cell: (events[cell], np.concatenate(keys)) for cell, keys in parts.items()}


def _missing(
    cells: RankCells, cell: str, life: Life, own: Accesses | None, due: tuple[str, Ints]
) -> Iterator[Violation]:
    """Cells that the plan demands and no instruction makes."""
    events, keys = due
    codes = [life.events.index(event) for event in events.split()]
    if (own.count(codes) if own else 0) == keys.size:
        return
    found = own.keys[np.isin(own.events, codes)] if own else keys[:0]
    for key in np.setdiff1d(keys, found)[:1].tolist():
        stage, microbatch, where = cells.place_of(cell, key)
        site = cells.step.probable_site((), cells.rank, stage, microbatch)
        ops = " or ".join(op for event in events.split() for op in _causes(cell, event))
        yield Violation(site, f"{ops} of {where} is missing on rank {cells.rank}; expected once")
