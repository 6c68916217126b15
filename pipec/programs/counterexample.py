"""A counterexample as text: the cells of a few ranks around the bad one, which is marked."""

from collections.abc import Mapping, Sequence

from pipec.ir import Compute, Placement, count_ranks
from pipec.ir.text_format import PHASE_LETTERS

_RANKS_AROUND = 2
_CELLS_AROUND = 5
_MOST_RANKS = 8


def counterexample(
    orders: Sequence[Sequence[Compute]], placement: Placement, marked: Mapping[int, int]
) -> str:
    """A row per rank near a marked one, its cells in order; ``marked[rank]`` is the place of a bad cell.

    ``F3`` is the forward of microbatch 3; if a rank holds several stages, ``F3.1`` is that of stage 1.
    """
    near = {rank + step for rank in marked for step in range(-_RANKS_AROUND, _RANKS_AROUND + 1)}
    ranks = [rank for rank in sorted(near) if 0 <= rank < len(orders)][:_MOST_RANKS]
    middle = min(marked.values())
    first = max(middle - _CELLS_AROUND, 0)
    last = max(max(marked.values()), middle) + _CELLS_AROUND + 1
    several = count_ranks(placement) < sum(map(len, placement))
    rows = []
    for rank in ranks:
        cells = orders[rank][first : min(last, first + 4 * _CELLS_AROUND)]
        shown = [
            f"[{_label(cell, several)}]" if marked.get(rank) == place else f" {_label(cell, several)} "
            for place, cell in enumerate(cells, first)
        ]
        rows.append((f"rank {rank}", "..." if first else "", shown))
    margin = max(len(name) for name, *_ in rows)
    width = max((len(label) for *_, shown in rows for label in shown), default=0)
    lines = [
        f"  {name:{margin}} {before:3} " + "".join(label.ljust(width) for label in shown)
        for name, before, shown in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _label(cell: Compute, several: bool) -> str:
    return f"{PHASE_LETTERS[cell.phase]}{cell.microbatch}" + (f".{cell.stage}" if several else "")
