"""The seconds of stages that begin at some boundaries (rows) and end at others (columns), as matrices.

An entry is infinite where no stage lies between the boundaries, or it does not fit in memory.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipec.hardware.topology import Device, Level
from pipec.planner.boundaries import Boundaries, Mask, Vector
from pipec.planner.cost_model import CostModel
from pipec.planner.partition import exchanged_seconds
from pipec.planner.workload import COLUMNS

T = TypeVar("T", bound=np.generic)

Matrix = Vector
Indices = NDArray[np.intp]

_SECONDS, _PARAMETERS, _RESIDENT, _SAVED = range(len(COLUMNS))


@dataclass(frozen=True)
class Ranges:
    """Costs of stages between ``boundaries``. ``nested`` and ``exchanged`` hold what needs pairs of them.

    ``nested`` is None in a line. ``exchanged[level]`` has the seconds of all values with one end inside the
    stage and one outside; it is None if the cost model asks for cuts alone, or if the cuts at both
    boundaries add up to just that.
    """

    boundaries: Boundaries
    model: CostModel
    levels: Sequence[Level]
    nested: Mask | None
    exchanged: Sequence[Matrix] | None

    def on_device(self, device: Device, after: int, rows: Indices, columns: Indices) -> Matrix:
        """Seconds of the operators alone, with ``after`` later devices for each replica."""
        seconds = self._total(_SECONDS, rows, columns) / device.speed
        seconds[~self._is_range(rows, columns)] = np.inf
        if device.memory_bytes < np.inf:
            seconds[self.memory_bytes(after, rows, columns) > device.memory_bytes] = np.inf
        return seconds

    def lower_bounds(self, speed: float, everything: Indices) -> tuple[Matrix, Matrix, Matrix]:
        """Seconds of the operators, infinite where there is no stage; parameter bytes; seconds of links."""
        seconds = self._total(_SECONDS, everything, everything) / speed
        busy = np.where(self._is_range(everything, everything), seconds, np.inf)
        links = (self._link(level, False, everything, everything) for level in range(len(self.levels)))
        return busy, self._total(_PARAMETERS, everything, everything), functools.reduce(np.minimum, links)

    def memory_bytes(self, after: int, rows: Indices, columns: Indices) -> Matrix:
        saved = self.model.in_flight(after) * self._total(_SAVED, rows, columns)
        return self._total(_RESIDENT, rows, columns) + saved

    def stage(
        self, busy: Matrix, level: int, replicas: int, is_first: bool, rows: Indices, columns: Indices
    ) -> Matrix:
        """Seconds on ``replicas`` members that are ``busy`` for so long; ``is_first`` within its group."""
        link = self._link(level, is_first, rows, columns)
        if replicas > 1:
            busy = busy / replicas + self._all_reduce(level, replicas, is_first, rows, columns)
            link = link / replicas
        return np.maximum(busy, link) if self.model.overlap else busy + link

    def communication(
        self, level: int, replicas: int, is_first: bool, rows: Indices, columns: Indices
    ) -> Matrix:
        """Seconds of links and all-reduce: what decides between plans that are equally fast."""
        shape = (len(rows), len(columns))
        link = self._link(level, is_first, rows, columns) / replicas
        if replicas > 1:
            link = link + self._all_reduce(level, replicas, is_first, rows, columns)
        return np.broadcast_to(link, shape)

    def _is_range(self, rows: Indices, columns: Indices) -> Mask:
        if self.nested is None:
            return rows[:, None] < columns[None, :]
        return between(self.nested, rows, columns)

    def _total(self, column: int, rows: Indices, columns: Indices) -> Matrix:
        totals = self.boundaries.totals[column]
        total: Matrix = totals[None, columns] - totals[rows, None]
        return total

    def _link(self, level: int, is_first: bool, rows: Indices, columns: Indices) -> Matrix:
        cuts = self.boundaries.cuts[level]
        if self.model.overlap:
            return np.zeros((len(rows), 1)) if is_first else cuts[rows, None]
        link: Matrix
        if self.exchanged is None:
            link = cuts[rows, None] + cuts[None, columns]
        else:
            link = between(self.exchanged[level], rows, columns)
        return link

    def _all_reduce(
        self, level: int, replicas: int, is_first: bool, rows: Indices, columns: Indices
    ) -> Matrix:
        parameters = self._total(_PARAMETERS, rows, columns)
        links = self.model.links_of_first(self.levels, level) if is_first else 1
        at_this = self.levels[level]
        share = self.model.all_reduce_seconds_per_byte(replicas, links * at_this.bytes_per_second)
        latency = self.model.all_reduce_latency(replicas, at_this)
        return parameters * share + (parameters > 0) * latency


def between(matrix: NDArray[T], rows: Indices, columns: Indices) -> NDArray[T]:
    """Not a copy where rows and columns are next to each other."""
    if _are_adjacent(rows) and _are_adjacent(columns):
        return matrix[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return matrix[rows[:, None], columns]


def _are_adjacent(indices: Indices) -> bool:
    return len(indices) > 0 and bool(indices[-1] - indices[0] == len(indices) - 1)


def ranges(
    boundaries: Boundaries, value_seconds: Vector, levels: Sequence[Level], model: CostModel
) -> Ranges:
    by_cuts = model.overlap or _cuts_suffice(boundaries)
    nested = None if boundaries.is_line else _nested(boundaries)
    exchanged = None if by_cuts else _exchanged(boundaries, value_seconds)
    return Ranges(boundaries, model, levels, nested, exchanged)


def _cuts_suffice(boundaries: Boundaries) -> bool:
    """Whether no value can cross two boundaries: then a stage exchanges what crosses either of its own."""
    return boundaries.is_line and all(ends[-1] - ends[0] <= 1 for ends in boundaries.ends)


def _nested(boundaries: Boundaries) -> Mask:
    holds = boundaries.holds().astype(np.float32)  # exact: counts below 2 ** 24
    nested: Mask = (holds.T @ holds) == holds.sum(axis=0)[:, None]
    np.fill_diagonal(nested, False)
    return nested


def _exchanged(boundaries: Boundaries, value_seconds: Vector) -> Sequence[Matrix]:
    """For each level, between any two boundaries, the seconds of the values a stage shares with others."""
    if not boundaries.is_line:
        return _exchanged_by_sets(boundaries, value_seconds)
    places = np.arange(len(boundaries.order))
    block_of = (np.searchsorted(boundaries.sizes, places, side="right") - 1).tolist()
    blocks = [sorted({block_of[end] for end in ends}) for ends in boundaries.ends]
    together = [k for k, each in enumerate(blocks) if len(each) > 1]
    return [
        exchanged_seconds(((blocks[k], float(seconds[k])) for k in together), len(boundaries))
        for seconds in value_seconds
    ]


def _exchanged_by_sets(boundaries: Boundaries, value_seconds: Vector) -> Sequence[Matrix]:
    """Of values with the same ends at a time, a product of indicators. Without meaning where no stage lies.

    A stage shares a value if some of its ends are inside, but not all: if c of them are before its first
    boundary and more, or if c is none more but not all, before its last.
    """
    holds, alike = boundaries.holds(), _alike(boundaries.ends)
    at_first, at_last, owner = [], [], []
    for index, ends in enumerate(alike):
        before = holds[list(ends)].sum(axis=0)
        at_first += [before == count for count in range(len(ends))]
        at_last += [(before > 0) & (before < len(ends)), *(before > count for count in range(1, len(ends)))]
        owner += [index] * len(ends)
    first = np.array(at_first, dtype=float).reshape(len(owner), len(boundaries))
    last = np.array(at_last, dtype=float).reshape(len(owner), len(boundaries))
    together = np.array([value_seconds[:, values].sum(axis=1) for values in alike.values()])
    return [(first.T * seconds[owner]) @ last for seconds in together.T.reshape(len(value_seconds), -1)]


def _alike(ends: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """The values that have each set of ends."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for value, each in enumerate(ends):
        alike.setdefault(tuple(each), []).append(value)
    return alike
