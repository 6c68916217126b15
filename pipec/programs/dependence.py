"""Which cells come after which, however long cells and messages take."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipec.ir.columns import Ints
from pipec.programs.timing import AT_START, Reads, Run, read_columns

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Dependence:
    """What cells read, where those of each resource begin, and one run of them."""

    reads: Reads
    first_cells: Sequence[int]
    run: Run

    def comes_after(self, cells: Ints, others: Ints) -> Bools:
        """Entry by entry, whether cell ``cells[i]`` comes after cell ``others[i]`` in every run.

        It does if it reads what the other makes, or follows it on its resource, or both by way of cells
        between the two. What comes after the other in every run does so in ``run``. A search backwards from
        the cell therefore ends at what starts before the other has ended.
        """
        found = np.zeros(cells.size, bool)
        for place in np.flatnonzero(self.run.starts[cells] >= self.run.ends[others]).tolist():
            found[place] = self._leads_to(int(others[place]), int(cells[place]))
        return found

    def _leads_to(self, other: int, cell: int) -> bool:
        starts, beginning = self.run.starts, self.run.ends[other]
        waiting, seen = [cell], {cell}
        while waiting:
            before = self._before(waiting.pop())
            if other in before:
                return True
            for each in before:
                if each not in seen and starts[each] >= beginning:
                    seen.add(each)
                    waiting.append(each)
        return False

    def _before(self, cell: int) -> list[int]:
        """What a cell waits for: what it reads, and the one before it on its resource."""
        read = [made for column in self._columns if (made := int(column[cell])) != AT_START]
        return read if cell in self._firsts else [*read, cell - 1]

    @cached_property
    def _columns(self) -> Sequence[Ints]:
        return read_columns(self.reads, self.run.starts.size)

    @cached_property
    def _firsts(self) -> frozenset[int]:
        return frozenset(self.first_cells)
