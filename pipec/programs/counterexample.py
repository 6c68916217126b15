"""A counterexample as text: the computes of a few ranks around a marked faulty one."""

from collections.abc import Mapping, Sequence

from pipec.ir import Compute, Placement, count_ranks
from pipec.ir.text_format import PHASE_LETTERS

_RANKS_AROUND = 2
_COMPUTES_AROUND = 5
_MAX_RANKS = 8


def counterexample(
    orders: Sequence[Sequence[Compute]], placement: Placement, marked: Mapping[int, int]
) -> str:
    """A row of computes for each rank near a marked one; ``marked[rank]`` is the place of a faulty compute.

    ``F3`` is the forward of microbatch 3. If a rank has several stages, ``F3.1`` is the forward of stage 1.
    """
    near = {rank + step for rank in marked for step in range(-_RANKS_AROUND, _RANKS_AROUND + 1)}
    ranks = [rank for rank in sorted(near) if 0 <= rank < len(orders)][:_MAX_RANKS]
    first = max(min(marked.values()) - _COMPUTES_AROUND, 0)
    last = max(marked.values()) + _COMPUTES_AROUND + 1
    several = count_ranks(placement) < sum(map(len, placement))
    rows = []
    for rank in ranks:
        computes = orders[rank][first : min(last, first + 4 * _COMPUTES_AROUND)]
        labels = [
            f"[{_label(compute, several)}]" if marked.get(rank) == place else f" {_label(compute, several)} "
            for place, compute in enumerate(computes, first)
        ]
        rows.append((f"rank {rank}", "..." if first else "", labels))
    margin = max(len(name) for name, *_ in rows)
    width = max((len(label) for *_, labels in rows for label in labels), default=0)
    lines = [
        f"  {name:{margin}} {before:3} " + "".join(label.ljust(width) for label in labels)
        for name, before, labels in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _label(compute: Compute, several: bool) -> str:
    label = f"{PHASE_LETTERS[compute.phase]}{compute.microbatch}"
    return f"{label}.{compute.stage}" if several else label
