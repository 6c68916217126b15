"""When cells run if every resource runs its next cell as soon as it can: on columns, all resources at once.

A resource is what runs one cell after another: a rank its computes, a channel its messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipec.ir.columns import Floats, Ints

AT_START, NEVER = -1, -2
"""What a cell may read besides what cells make: something there from the start, or something never made."""


@dataclass(frozen=True)
class Reads:
    """Entry by entry: cell ``readers`` starts no earlier than cell ``producers`` has ended."""

    readers: Ints
    producers: Ints


@dataclass(frozen=True)
class Run:
    """When each cell starts and ends, from time 0. ``inputs`` are what cells read, as ``read_columns``."""

    starts: Floats
    ends: Floats
    inputs: Sequence[Ints]


@dataclass(frozen=True)
class Deadlock:
    """The cells at which resources wait for each other, or for what is never made."""

    cells: Ints


def run_cells(durations: Floats, reads: Reads, first_cells: Sequence[int]) -> Run | Deadlock:
    """Run all cells. Those of resource r are numbered from ``first_cells[r]``, as they follow each other.

    Each round runs the next cell of every resource for which all is there that the cell reads. Two resources
    have two cells of one unit each; cell 2 reads cell 0, and cell 1 reads cell 3::

        first_cells [0, 2, 4]     round         1    2    3    4
        readers     [2, 1]        resource 0    0              1
        producers   [0, 3]        resource 1         2    3
                                  starts at     0    1    2    3

    There are as many rounds as cells in the longest chain of which each waits for the one before it. A round
    takes a few operations on a column with an entry for each resource.
    """
    starts, ends = np.empty(durations.size), np.full(durations.size + 2, np.inf)
    ends[AT_START] = 0.0
    inputs = read_columns(reads, durations.size)
    cell, last = np.array(first_cells[:-1]), np.array(first_cells[1:])
    clock = np.zeros(cell.size)
    unfinished = np.flatnonzero(cell < last)
    while unfinished.size:
        at, start = cell[unfinished], clock[unfinished]
        for producers in inputs:
            np.maximum(start, ends[producers[at]], out=start)
        ready = start < np.inf
        started, at, start = unfinished[ready], at[ready], start[ready]
        if not started.size:
            return Deadlock(cell[unfinished])
        starts[at] = start
        clock[started] = ends[at] = start + durations[at]
        cell[started] = at + 1
        if (at + 1 == last[started]).any():
            unfinished = unfinished[cell[unfinished] < last[unfinished]]
    return Run(starts, ends[: durations.size], inputs)


def read_columns(reads: Reads, num_cells: int) -> list[Ints]:
    """What each cell reads: column k has its k-th producer, or what is there from the start.

    Where cell 1 reads cells 5 and 7, and cell 2 reads cell 6::

        readers [1, 2, 1], producers [5, 6, 7]  ->  [[-1, 5, 6], [-1, 7, -1]]
    """
    readers, producers = reads.readers, reads.producers
    columns = []
    first = np.empty(num_cells, np.int32)
    while readers.size:
        numbers = np.arange(readers.size, dtype=np.int32)
        first[readers[::-1]] = numbers[::-1]
        is_first = first[readers] == numbers
        column = np.full(num_cells, AT_START, np.int32)
        column[readers[is_first]] = producers[is_first]
        columns.append(column)
        readers, producers = readers[~is_first], producers[~is_first]
    return columns
