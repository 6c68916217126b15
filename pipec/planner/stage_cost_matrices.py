"""The seconds of all stages between some downsets, as matrices.

A stage begins at one downset (a row) and ends at another (a column). For a chain of three operators that take
1, 2 and 4 seconds, the downsets hold 0, 1, 2 and 3 operators, and a stage takes::

              ends at  0    1    2    3
    begins at 0       inf   1    3    7
              1       inf  inf   2    6
              2       inf  inf  inf   4

An entry is infinite where the row's downset is not inside the column's, or where the stage does not fit in
memory. Every method takes the ``rows`` and ``columns`` that it is asked about.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipec.hardware.topology import Device, Level
from pipec.planner.cost_model import CostModel
from pipec.planner.downsets import Downsets, Indices, Mask, Vector
from pipec.planner.operator_graph import COLUMNS

T = TypeVar("T", bound=np.generic)

Matrix = Vector

_SECONDS, _PARAMETERS, _RESIDENT, _SAVED = range(len(COLUMNS))


@dataclass(frozen=True)
class StageCostMatrices:
    """Costs of stages between ``downsets``.

    ``contained[d, e]`` tells whether downset d is a proper part of downset e; it is None in a chain.
    ``exchanged[level][d, e]`` has the seconds of the values that a stage shares with others; it is None where
    the cost model asks only for what crosses the first downset.
    """

    downsets: Downsets
    model: CostModel
    levels: Sequence[Level]
    contained: Mask | None
    exchanged: Sequence[Matrix] | None

    def device_seconds(self, device: Device, after: int, rows: Indices, columns: Indices) -> Matrix:
        """Seconds of the operators alone, with ``after`` later devices for each replica."""
        seconds = self._total(_SECONDS, rows, columns) / device.speed
        seconds[~self._is_stage(rows, columns)] = np.inf
        if device.memory_bytes < np.inf:
            seconds[self.memory_bytes(after, rows, columns) > device.memory_bytes] = np.inf
        return seconds

    def lower_bounds(self, speed: float, everything: Indices) -> tuple[Matrix, Matrix, Matrix]:
        """Seconds of the operators at ``speed``; parameter bytes; seconds of the best link."""
        seconds = self._total(_SECONDS, everything, everything) / speed
        busy = np.where(self._is_stage(everything, everything), seconds, np.inf)
        links = (self._link(level, False, everything, everything) for level in range(len(self.levels)))
        return busy, self._total(_PARAMETERS, everything, everything), functools.reduce(np.minimum, links)

    def memory_bytes(self, after: int, rows: Indices, columns: Indices) -> Matrix:
        saved = self.model.in_flight(after) * self._total(_SAVED, rows, columns)
        return self._total(_RESIDENT, rows, columns) + saved

    def stage_seconds(
        self, busy: Matrix, level: int, replicas: int, is_first: bool, rows: Indices, columns: Indices
    ) -> Matrix:
        """Seconds on ``replicas`` members of a group that are ``busy`` for so long with their operators.

        ``is_first``: the stage is the first of its group.
        """
        link = self._link(level, is_first, rows, columns) / replicas
        if replicas > 1:
            busy = busy / replicas + self._all_reduce(level, replicas, is_first, rows, columns)
        return np.maximum(busy, link) if self.model.overlap else busy + link

    def busy_limit(
        self, limit: float, level: int, replicas: int, is_first: bool, rows: Indices, columns: Indices
    ) -> Matrix:
        """How long members may be busy so that a stage takes no more than ``limit`` seconds."""
        other = np.zeros((len(rows), len(columns)))
        if not self.model.overlap:
            other = other + self._link(level, is_first, rows, columns) / replicas
        if replicas > 1:
            other = other + self._all_reduce(level, replicas, is_first, rows, columns)
        return (limit - other) * replicas

    def communication_seconds(
        self, level: int, replicas: int, is_first: bool, rows: Indices, columns: Indices
    ) -> Matrix:
        """Seconds of links and all-reduce, by which plans that are equally fast are compared."""
        shape = (len(rows), len(columns))
        link = self._link(level, is_first, rows, columns) / replicas
        if replicas > 1:
            link = link + self._all_reduce(level, replicas, is_first, rows, columns)
        return np.broadcast_to(link, shape)

    def _is_stage(self, rows: Indices, columns: Indices) -> Mask:
        if self.contained is None:
            return rows[:, None] < columns[None, :]
        return submatrix(self.contained, rows, columns)

    def _total(self, column: int, rows: Indices, columns: Indices) -> Matrix:
        totals = self.downsets.totals[column]
        total: Matrix = totals[None, columns] - totals[rows, None]
        return total

    def _link(self, level: int, is_first: bool, rows: Indices, columns: Indices) -> Matrix:
        if self.exchanged is not None:
            return submatrix(self.exchanged[level], rows, columns)
        if is_first:
            return np.zeros((len(rows), 1))
        cuts: Matrix = self.downsets.cuts[level, rows, None]
        return cuts

    def _all_reduce(
        self, level: int, replicas: int, is_first: bool, rows: Indices, columns: Indices
    ) -> Matrix:
        parameters = self._total(_PARAMETERS, rows, columns)
        links = self.model.links_of_first(self.levels, level) if is_first else 1
        at_this = self.levels[level]
        share = self.model.all_reduce_seconds_per_byte(replicas, links * at_this.bytes_per_second)
        latency = self.model.all_reduce_latency(replicas, at_this)
        return parameters * share + (parameters > 0) * latency


def submatrix(matrix: NDArray[T], rows: Indices, columns: Indices) -> NDArray[T]:
    """The entries at ``rows`` and ``columns``, as a view where these are consecutive."""
    if _are_consecutive(rows) and _are_consecutive(columns):
        return matrix[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return matrix[rows[:, None], columns]


def _are_consecutive(indices: Indices) -> bool:
    return len(indices) > 0 and bool(indices[-1] - indices[0] == len(indices) - 1)


def stage_cost_matrices(
    downsets: Downsets, value_seconds: Vector, levels: Sequence[Level], model: CostModel
) -> StageCostMatrices:
    contained = None if downsets.is_chain else _contained(downsets)
    exchanged = None if model.overlap else _exchanged(downsets, value_seconds)
    return StageCostMatrices(downsets, model, levels, contained, exchanged)


def _contained(downsets: Downsets) -> Mask:
    """Downset d is inside downset e if they have as many operators in common as d has."""
    members = downsets.membership().astype(np.float32)  # exact: counts are below 2 ** 24
    contained: Mask = (members.T @ members) == members.sum(axis=0)[:, None]
    np.fill_diagonal(contained, False)
    return contained


def _exchanged(downsets: Downsets, value_seconds: Vector) -> Sequence[Matrix]:
    """For each level, the seconds of the values that a stage shares with others.

    Say c of the n operators that make or read a value are before the stage. The stage shares the value if
    more than c, and not just all the others, are before its end: that is, some are inside and some outside.
    So for each count c < n there is a column of starts (c are before) and a column of ends (more than c are;
    if c is 0, not all of them), and their product marks the stages that share the value::

        value of operators 0 and 2     starts with c = 0: {}, {0} has c = 1
                                       ends for c = 0: {0}, {0, 1};   for c = 1: {0, 1, 2}

    Entries have no meaning where there is no stage. Values with the same operators are added up first.
    """
    members, alike = downsets.membership(), _same_ends(downsets.ends)
    starts, ends, owner = [], [], []
    for index, operators in enumerate(alike):
        before = members[list(operators)].sum(axis=0)
        n = len(operators)
        starts += [before == count for count in range(n)]
        ends += [(before > 0) & (before < n), *(before > count for count in range(1, n))]
        owner += [index] * n
    start = np.array(starts, dtype=float).reshape(len(owner), len(downsets))
    end = np.array(ends, dtype=float).reshape(len(owner), len(downsets))
    together = np.array([value_seconds[:, values].sum(axis=1) for values in alike.values()])
    return [(start.T * seconds[owner]) @ end for seconds in together.T.reshape(len(value_seconds), -1)]


def _same_ends(ends: Sequence[Sequence[int]]) -> dict[tuple[int, ...], list[int]]:
    """The values, by the operators that make or read them."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for value, operators in enumerate(ends):
        alike.setdefault(tuple(operators), []).append(value)
    return alike
