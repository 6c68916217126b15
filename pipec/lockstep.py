"""When cells end if every rank runs its next as soon as it can: all ranks at once, unit by unit of time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipec.columns import Ints

_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Stuck:
    """The cells at which ranks wait for each other, or for what is never computed."""

    cells: Ints


def end_times(units: Ints, inputs: Sequence[Ints], first_cells: Sequence[int]) -> Ints | Stuck:
    """When each cell ends. Cells are numbered rank by rank: those of rank r start at ``first_cells[r]``.

    ``units[cell]``, at least 1, is how long it takes; in each column of ``inputs`` there is a cell that must
    have ended before it starts, or the number of cells where there is none. Time: that of the whole step in
    units, and for each unit a few operations on a column of the ranks.
    """
    num_cells = units.size
    ends = np.full(num_cells + 1, _NEVER, np.int32)
    ends[num_cells] = 0
    cell, last = np.array(first_cells[:-1]), np.array(first_cells[1:])
    busy_until = np.zeros(cell.size, np.int32)
    unfinished = np.flatnonzero(cell < last)
    now = 0
    while unfinished.size:
        free = unfinished[busy_until[unfinished] <= now]
        ready = np.ones(free.size, bool)
        for column in inputs:
            ready &= ends[column[cell[free]]] <= now
        started = free[ready]
        if not started.size and (busy_until <= now).all():
            return Stuck(cell[free])
        cells = cell[started]
        busy_until[started] = ends[cells] = now + units[cells]
        cell[started] += 1
        if (cell[started] == last[started]).any():
            unfinished = unfinished[cell[unfinished] < last[unfinished]]
        now += 1
    return ends[:num_cells]
