"""When cells run if every resource runs its next cell as soon as it can: on columns, all resources at once.

A resource is what runs one cell after another: a rank its computes, a channel its messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from pipec.ir.columns import Floats, Ints

AVAILABLE_AT_START, NEVER_PRODUCED = -1, -2
"""What a cell may read besides what cells make: something there from the start, or something never made."""


@dataclass(frozen=True)
class TaskInputs:
    """Entry by entry: cell ``readers`` starts no earlier than cell ``producers`` has ended."""

    readers: Ints
    producers: Ints


@dataclass(frozen=True)
class TaskTimes:
    """When each task starts and ends, from time 0. ``inputs`` are what tasks read, by column."""

    starts: Floats
    ends: Floats
    inputs: Sequence[Ints]


@dataclass(frozen=True)
class Deadlock:
    """The tasks at which resources wait for each other, or for what is never made."""

    cells: Ints


def run_tasks(
    durations: Floats, reads: TaskInputs, first_tasks: Sequence[int], groups: Sequence[int] | None = None
) -> TaskTimes | Deadlock:
    """Run all cells. Those of resource r are numbered from ``first_tasks[r]``, as they follow each other.

    ``groups`` are the first resources of groups that mostly wait within themselves, and for the groups beside
    them: a rank and the channels that it sends into. Without them each resource is one. They decide how fast
    times are found, not which.
    """
    inputs = read_columns(reads, durations.size)
    found = _sweep(durations, inputs, first_tasks, groups or range(len(first_tasks) - 1))
    return found or _run_in_rounds(durations, inputs, first_tasks)


_MOST_SWEEPS = 8
"""Steps with as many microbatches as one likes settle in 2 to 7, if ranks are busy in their steady state."""

_GRAINS = 1024
"""Of a unit of time."""


def _sweep(
    durations: Floats, inputs: Sequence[Ints], first_tasks: Sequence[int], groups: Sequence[int]
) -> TaskTimes | None:
    """The run, by sweeps over the resources: from the first group to the last, and back again.

    A sweep runs all cells of a resource at once, given when those that they read end as far as is known. The
    first sweep knows nothing, and times only grow. If a whole sweep changes none, each cell starts when the
    last of what it waits for has ended, and only one run does that: where cells waited for each other in a
    ring, times would grow without end. So that this is so, a cell without duration may read lower numbers
    alone. Times are whole numbers of 1/1024, of which sums are exact. There is no answer if one of these does
    not hold, or times have not settled after a few sweeps.
    """
    if not _can_sweep(durations, inputs):
        return None
    before, ends = np.empty(durations.size), np.zeros(durations.size + 2)
    slices = [slice(*bounds) for bounds in pairwise(first_tasks)]
    for own in slices:
        before[own] = np.cumsum(durations[own]) - durations[own]
    order = [slices[first:last] for first, last in pairwise([*groups, len(slices)])]
    for _ in range(_MOST_SWEEPS):
        settled = True
        for own in chain.from_iterable(order):
            behind = np.zeros(own.stop - own.start)
            for producers in inputs:
                np.maximum(behind, ends[producers[own]] - before[own], out=behind)
            found = np.maximum.accumulate(behind) + before[own] + durations[own]
            settled = settled and np.array_equal(found, ends[own])
            ends[own] = found
        if settled:
            return TaskTimes(np.subtract(ends[:-2], durations, out=before), ends[:-2], inputs)
        order.reverse()
    return None


def _can_sweep(durations: Floats, inputs: Sequence[Ints]) -> bool:
    """Whether times are exact, and each ring of cells would have one that lasts."""
    grains = durations * _GRAINS
    if not (grains >= 0).all() or not grains.sum() < 2**53 or (grains != np.floor(grains)).any():
        return False
    instant = np.flatnonzero(durations <= 0)
    return all(
        producers.min(initial=AVAILABLE_AT_START) >= AVAILABLE_AT_START
        and (producers[instant] < instant).all()
        for producers in inputs
    )


def _run_in_rounds(
    durations: Floats, inputs: Sequence[Ints], first_tasks: Sequence[int]
) -> TaskTimes | Deadlock:
    """The run, or where it ends.

    Each round runs the next cell of every resource for which all is there that the cell reads. Two resources
    have two cells of one unit each; cell 2 reads cell 0, and cell 1 reads cell 3::

        first_tasks [0, 2, 4]     round         1    2    3    4
        readers     [2, 1]        resource 0    0              1
        producers   [0, 3]        resource 1         2    3
                                  starts at     0    1    2    3

    There are as many rounds as cells in the longest chain of which each waits for the one before it. A round
    takes a few operations on a column with an entry for each resource.
    """
    starts, ends = np.empty(durations.size), np.full(durations.size + 2, np.inf)
    ends[AVAILABLE_AT_START] = 0.0
    cell, last = np.array(first_tasks[:-1]), np.array(first_tasks[1:])
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
    return TaskTimes(starts, ends[: durations.size], inputs)


def read_columns(reads: TaskInputs, num_cells: int) -> list[Ints]:
    """What each cell reads: column k has its k-th producer, or what is there from the start.

    A producer that is read twice is named once.

    Where cell 1 reads cells 5 and 7, and cell 2 reads cell 6::

        readers [1, 2, 1], producers [5, 6, 7]  ->  [[-1, 5, 6], [-1, 7, -1]]
    """
    readers, producers = reads.readers, reads.producers
    columns = []
    while readers.size:
        column = np.full(num_cells, AVAILABLE_AT_START, np.int32)
        column[readers[::-1]] = producers[::-1]
        columns.append(column)
        left = np.flatnonzero(column[readers] != producers)
        readers, producers = readers[left], producers[left]
    return columns
