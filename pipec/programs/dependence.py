"""The order of tasks that holds however long tasks and messages take."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipec.ir.columns import Ints
from pipec.programs.task_times import AVAILABLE_AT_START, TaskTimes

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Dependence:
    """The first task of each resource, and one run of all tasks."""

    first_tasks: Sequence[int]
    run: TaskTimes

    def depends_on(self, tasks: Ints, others: Ints) -> Bools:
        """Entry by entry, whether task ``tasks[i]`` comes after task ``others[i]`` in every run.

        It does if it reads a result of the other, or follows it on its resource, directly or through tasks
        between the two. A task that follows the other in every run also follows it in ``run``. So a search
        backwards ends at tasks that start before the other has ended.
        """
        depends = np.zeros(tasks.size, bool)
        candidates = np.flatnonzero(self.run.starts[tasks] >= self.run.ends[others])
        depends[candidates] = self._are_near(others[candidates], tasks[candidates])
        far = candidates[~depends[candidates]]
        depends[far] = self._lead_to(others[far], tasks[far])
        return depends

    def _are_near(self, others: Ints, tasks: Ints) -> Bools:
        """Whether at most one task is between the two.

        This is the case where a pipeline turns from forwards to backwards: in GPipe the first backward of a
        rank comes after the last forward of the rank before it, and a search would visit all tasks that the
        later ranks ran meanwhile.
        """
        before = np.stack(self._before(tasks))
        near: Bools = (before == others).any(axis=0)
        for each in before:
            near |= (each >= 0) & (np.stack(self._before(each)) == others).any(axis=0)
        return near

    def _lead_to(self, others: Ints, tasks: Ints) -> Bools:
        """Search for all pairs at once. Of the tasks reached for a pair, the latest is expanded first.

        So each task is expanded once, because all tasks that it waits for start before it.
        """
        starts, beginning, num_tasks = self.run.starts, self.run.ends[others], self.run.starts.size
        depends = np.zeros(tasks.size, bool)
        pairs, reached = np.arange(tasks.size), tasks.astype(np.int64)
        while pairs.size:
            latest = np.zeros(tasks.size)
            np.maximum.at(latest, pairs, starts[reached])
            is_latest = starts[reached] == latest[pairs]
            before = self._before(reached[is_latest])
            earlier = np.tile(pairs[is_latest], len(before)), np.concatenate(before)
            depends[earlier[0][earlier[1] == others[earlier[0]]]] = True
            pairs, reached = (np.concatenate(both) for both in ((pairs, earlier[0]), (reached, earlier[1])))
            unexplored = np.concatenate([~is_latest, earlier[1] >= 0]) & ~depends[pairs]
            unexplored &= starts[reached] >= beginning[pairs]
            remaining = np.unique(pairs[unexplored] * num_tasks + reached[unexplored])
            pairs, reached = np.divmod(remaining, num_tasks)
        return depends

    def _before(self, tasks: Ints) -> list[Ints]:
        """The tasks that tasks wait for: the previous one on the resource, and their inputs; -1 is none."""
        return [
            np.where(self._is_first[tasks], AVAILABLE_AT_START, tasks - 1),
            *(each[tasks] for each in self.run.inputs),
        ]

    @cached_property
    def _is_first(self) -> Bools:
        depends = np.zeros(self.run.starts.size + 1, bool)
        depends[np.array(self.first_tasks)] = True
        return depends
