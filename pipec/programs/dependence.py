"""Which cells come after which, however long cells and messages take."""

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
    """Where the cells of each resource begin, and one run of them."""

    first_tasks: Sequence[int]
    run: TaskTimes

    def depends_on(self, cells: Ints, others: Ints) -> Bools:
        """Entry by entry, whether cell ``cells[i]`` comes after cell ``others[i]`` in every run.

        It does if it reads what the other makes, or follows it on its resource, or both by way of cells
        between the two. What comes after the other in every run does so in ``run``. A search backwards from
        the cell therefore ends at what starts before the other has ended.
        """
        found = np.zeros(cells.size, bool)
        asked = np.flatnonzero(self.run.starts[cells] >= self.run.ends[others])
        found[asked] = self._are_near(others[asked], cells[asked])
        far = asked[~found[asked]]
        found[far] = self._lead_to(others[far], cells[far])
        return found

    def _are_near(self, others: Ints, cells: Ints) -> Bools:
        """Whether there is at most one cell between the two.

        It is so where a pipeline turns round: in GPipe the first backward of a rank comes after the last
        forward of the rank before it, and a search would look at all that the ranks behind did meanwhile.
        """
        before = np.stack(self._before(cells))
        near: Bools = (before == others).any(axis=0)
        for each in before:
            near |= (each >= 0) & (np.stack(self._before(each)) == others).any(axis=0)
        return near

    def _lead_to(self, others: Ints, cells: Ints) -> Bools:
        """Search for all pairs at once. Of the cells that are reached for a pair, the latest goes first.

        So each is gone back from once: what it waits for has started before it.
        """
        starts, beginning, num_cells = self.run.starts, self.run.ends[others], self.run.starts.size
        found = np.zeros(cells.size, bool)
        pairs, reached = np.arange(cells.size), cells.astype(np.int64)
        while pairs.size:
            latest = np.zeros(cells.size)
            np.maximum.at(latest, pairs, starts[reached])
            going = starts[reached] == latest[pairs]
            before = self._before(reached[going])
            earlier = np.tile(pairs[going], len(before)), np.concatenate(before)
            found[earlier[0][earlier[1] == others[earlier[0]]]] = True
            pairs, reached = (np.concatenate(both) for both in ((pairs, earlier[0]), (reached, earlier[1])))
            kept = np.concatenate([~going, earlier[1] >= 0]) & ~found[pairs]
            kept &= starts[reached] >= beginning[pairs]
            pairs, reached = np.divmod(np.unique(pairs[kept] * num_cells + reached[kept]), num_cells)
        return found

    def _before(self, cells: Ints) -> list[Ints]:
        """What cells wait for: the one before on their resource, and what they read; -1 is none."""
        return [
            np.where(self._is_first[cells], AVAILABLE_AT_START, cells - 1),
            *(each[cells] for each in self.run.inputs),
        ]

    @cached_property
    def _is_first(self) -> Bools:
        found = np.zeros(self.run.starts.size + 1, bool)
        found[np.array(self.first_tasks)] = True
        return found
