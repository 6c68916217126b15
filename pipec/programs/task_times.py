"""The times of tasks if every resource runs its next task as soon as it can: on columns, all at once.

A resource runs one task after another: a rank its computes, a channel its messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from pipec.ir.columns import Floats, Ints

AVAILABLE_AT_START = -1
"""The producer of an input that is available at the start, in place of a task."""


@dataclass(frozen=True)
class TaskInputs:
    """Entry by entry: task ``readers`` starts no earlier than task ``producers`` has ended."""

    readers: Ints
    producers: Ints


@dataclass(frozen=True)
class TaskTimes:
    """The start and end of each task, from time 0. ``inputs`` has the producers of tasks, by column."""

    starts: Floats
    ends: Floats
    inputs: Sequence[Ints]


@dataclass(frozen=True)
class Deadlock:
    """The tasks at which resources wait for each other."""

    tasks: Ints


def run_tasks(
    durations: Floats, reads: TaskInputs, first_tasks: Sequence[int], groups: Sequence[int] | None = None
) -> TaskTimes | Deadlock:
    """Run all tasks. The tasks of resource r are numbered from ``first_tasks[r]``, in order.

    ``groups`` are the first resources of groups that mostly wait within themselves, and for neighbouring
    groups: a rank and the channels that it sends into. By default each resource is a group. Groups affect how
    fast times are computed, not the times.
    """
    inputs = read_columns(reads, durations.size)
    found = _sweep(durations, inputs, first_tasks, groups or range(len(first_tasks) - 1))
    return found or _run_in_rounds(durations, inputs, first_tasks)


_MAX_SWEEPS = 8
"""Steps with any number of microbatches converge in 2 to 7, if ranks are busy in their steady state."""

_GRAINS = 1024
"""Of a unit of time."""


def _sweep(
    durations: Floats, inputs: Sequence[Ints], first_tasks: Sequence[int], groups: Sequence[int]
) -> TaskTimes | None:
    """The run, by sweeps over the resources: from the first group to the last, and back again.

    A sweep runs all tasks of a resource at once, with the ends of their inputs as computed so far. The first
    sweep assumes that all inputs end at 0, and times only grow. If a whole sweep changes no time, each task
    starts when the last of its inputs and its predecessor have ended, and only one run has this property: in
    a cycle of waits, times would grow without end. To make this true, a task without duration may only read
    tasks with lower numbers. Times are multiples of 1/1024, so that sums are exact. The result is None if one
    of these conditions does not hold, or times have not converged after a few sweeps.
    """
    if not _can_sweep(durations, inputs):
        return None
    before, ends = np.empty(durations.size), np.zeros(durations.size + 1)
    slices = [slice(*bounds) for bounds in pairwise(first_tasks)]
    for own in slices:
        before[own] = np.cumsum(durations[own]) - durations[own]
    order = [slices[first:last] for first, last in pairwise([*groups, len(slices)])]
    for _ in range(_MAX_SWEEPS):
        converged = True
        for own in chain.from_iterable(order):
            earliest = np.zeros(own.stop - own.start)
            for producers in inputs:
                np.maximum(earliest, ends[producers[own]] - before[own], out=earliest)
            found = np.maximum.accumulate(earliest) + before[own] + durations[own]
            converged = converged and np.array_equal(found, ends[own])
            ends[own] = found
        if converged:
            return TaskTimes(np.subtract(ends[:-1], durations, out=before), ends[:-1], inputs)
        order.reverse()
    return None


def _can_sweep(durations: Floats, inputs: Sequence[Ints]) -> bool:
    """Whether times are exact, and each cycle of tasks would have one with a duration."""
    grains = durations * _GRAINS
    if not (grains >= 0).all() or not grains.sum() < 2**53 or (grains != np.floor(grains)).any():
        return False
    instant = np.flatnonzero(durations <= 0)
    return all((producers[instant] < instant).all() for producers in inputs)


def _run_in_rounds(
    durations: Floats, inputs: Sequence[Ints], first_tasks: Sequence[int]
) -> TaskTimes | Deadlock:
    """The run, or the tasks at which it stops.

    Each round runs the next task of every resource whose inputs are available. Two resources have two tasks
    of one unit each; task 2 reads task 0, and task 1 reads task 3::

        first_tasks [0, 2, 4]     round         1    2    3    4
        readers     [2, 1]        resource 0    0              1
        producers   [0, 3]        resource 1         2    3
                                  starts at     0    1    2    3

    There are as many rounds as tasks in the longest chain of waits. A round takes a few operations on a
    column with an entry for each resource.
    """
    starts, ends = np.empty(durations.size), np.full(durations.size + 1, np.inf)
    ends[AVAILABLE_AT_START] = 0.0
    next_task, last = np.array(first_tasks[:-1]), np.array(first_tasks[1:])
    clock = np.zeros(next_task.size)
    unfinished = np.flatnonzero(next_task < last)
    while unfinished.size:
        at, start = next_task[unfinished], clock[unfinished]
        for producers in inputs:
            np.maximum(start, ends[producers[at]], out=start)
        ready = start < np.inf
        started, at, start = unfinished[ready], at[ready], start[ready]
        if not started.size:
            return Deadlock(next_task[unfinished])
        starts[at] = start
        clock[started] = ends[at] = start + durations[at]
        next_task[started] = at + 1
        if (at + 1 == last[started]).any():
            unfinished = unfinished[next_task[unfinished] < last[unfinished]]
    return TaskTimes(starts, ends[: durations.size], inputs)


def read_columns(reads: TaskInputs, num_tasks: int) -> list[Ints]:
    """The inputs of each task: column k has its k-th producer, or the one that is available at the start.

    A producer that is read twice is named once. Where task 1 reads tasks 5 and 7, and task 2 reads task 6::

        readers [1, 2, 1], producers [5, 6, 7]  ->  [[-1, 5, 6], [-1, 7, -1]]
    """
    readers, producers = reads.readers, reads.producers
    columns = []
    while readers.size:
        column = np.full(num_tasks, AVAILABLE_AT_START, np.int32)
        column[readers[::-1]] = producers[::-1]
        columns.append(column)
        left = np.flatnonzero(column[readers] != producers)
        readers, producers = readers[left], producers[left]
    return columns
