"""When cells run if every rank runs its next as soon as it can: all ranks go on at once, a cell at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipec.ir.columns import Floats, Ints

AT_START, NEVER = -1, -2
"""What a cell may read besides what cells make: what is there from the start, and what never comes."""


@dataclass(frozen=True)
class Reads:
    """Entry by entry: cell ``readers`` starts no earlier than ``delays`` after ``producers`` has ended."""

    readers: Ints
    producers: Ints
    delays: Floats | float = 0.0


@dataclass(frozen=True)
class Run:
    """When each cell starts and ends, from time 0."""

    starts: Floats
    ends: Floats


@dataclass(frozen=True)
class Stuck:
    """The cells at which ranks wait for each other, or for what is never computed."""

    cells: Ints


def run_cells(durations: Floats, reads: Reads, first_cells: Sequence[int]) -> Run | Stuck:
    """Run all cells. They are numbered rank by rank: those of rank r start at ``first_cells[r]``.

    Takes a few operations on a column of the ranks for each step of the longest chain of cells of which each
    has to wait for the one before it, on its own rank or on another.
    """
    starts, ends = np.empty(durations.size), np.full(durations.size + 2, np.inf)
    ends[AT_START] = 0.0
    inputs = _columns(reads, durations.size)
    cell, last = np.array(first_cells[:-1]), np.array(first_cells[1:])
    clock = np.zeros(cell.size)
    unfinished = np.flatnonzero(cell < last)
    while unfinished.size:
        at, start = cell[unfinished], clock[unfinished]
        for producers, delays in inputs:
            np.maximum(start, ends[producers[at]] + delays[at], out=start)
        ready = start < np.inf
        started, at, start = unfinished[ready], at[ready], start[ready]
        if not started.size:
            return Stuck(cell[unfinished])
        starts[at] = start
        clock[started] = ends[at] = start + durations[at]
        cell[started] = at + 1
        if (at + 1 == last[started]).any():
            unfinished = unfinished[cell[unfinished] < last[unfinished]]
    return Run(starts, ends[: durations.size])


def _columns(reads: Reads, num_cells: int) -> list[tuple[Ints, Floats]]:
    """What each cell reads: in column k its k-th producer with the delay, or what is there from the start."""
    order = np.argsort(reads.readers, kind="stable")
    readers, producers = reads.readers[order], reads.producers[order]
    delays = np.broadcast_to(reads.delays, order.shape)[order]
    nth = np.arange(readers.size) - np.searchsorted(readers, readers)
    columns = []
    for k in range(int(nth.max(initial=-1)) + 1):
        own = nth == k
        column, delay = np.full(num_cells, AT_START, np.int32), np.zeros(num_cells)
        column[readers[own]], delay[readers[own]] = producers[own], delays[own]
        columns.append((column, delay))
    return columns
