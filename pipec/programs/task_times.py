"""The times of tasks if every resource runs its next task as soon as it can: on columns, all at once.

A resource runs one task after another: a rank its computes, a channel its messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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


def run_tasks(durations: Floats, reads: TaskInputs, first_tasks: Sequence[int]) -> TaskTimes | Deadlock:
    """Run all tasks, or find where they stop. Those of resource r are numbered from ``first_tasks[r]``.

    Each round runs the next task of every resource whose inputs are available. Two resources have two tasks
    of one unit each; task 2 reads task 0, and task 1 reads task 3::

        first_tasks [0, 2, 4]     round         1    2    3    4
        readers     [2, 1]        resource 0    0              1
        producers   [0, 3]        resource 1         2    3
                                  starts at     0    1    2    3

    There are as many rounds as tasks in the longest chain of waits. A round takes a few operations on a
    column with an entry for each resource.
    """
    inputs = read_columns(reads, durations.size)
    starts, ends = np.empty(durations.size), np.full(durations.size + 1, np.inf)
    ends[AVAILABLE_AT_START] = 0.0
    next_task, last = np.array(first_tasks[:-1]), np.array(first_tasks[1:])
    clock = np.zeros(next_task.size)
    unfinished = np.flatnonzero(next_task < last)
    while unfinished.size:
        at, start = next_task.take(unfinished), clock.take(unfinished)
        for producers in inputs:
            np.maximum(start, ends.take(producers.take(at)), out=start)
        ready = np.flatnonzero(start < np.inf)
        if not ready.size:
            return Deadlock(at)
        started, at, start = unfinished.take(ready), at.take(ready), start.take(ready)
        starts[at] = start
        clock[started] = ends[at] = start + durations.take(at)
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
