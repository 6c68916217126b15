"""Chooses which forward values a rank saves for its backward, which it offloads, and which it recomputes.

A value is *saved*, *recomputed*, or neither if it is not needed. The backward needs some values, and a
recomputed value needs its inputs. A saved value may be *offloaded*: some of the microbatches in flight then
have it in host memory. The solution is the fastest choice within memory (an integer program, solved by
HiGHS)::

    minimise    sum of seconds[v] * r[v], and the seconds of copies
    so that     d[v] = 1              if the backward reads v
                d[v] >= r[v]          v is recomputed only if needed, and saved if needed and not recomputed:
                d[u] >= r[v]          d[v] - r[v] says so. u is an input of v
                d[v] - r[v] >= o[v]   v is offloaded only if it is saved
                at each moment: saved bytes of the microbatches in flight, without the offloaded ones, and
                                recomputed bytes <= room

Copies that overlap computes are free, so that the seconds of copies have a kink. It is solved on either
side::

    sum of bytes[v] * o[v] <= free      copies take next to nothing
    sum of bytes[v] * o[v] >= free      the bytes above take their time, to the host and back

Without these and the rooms the matrix is that of a network, so that the relaxation is nearly integral: a
stage of a thousand values takes about a tenth of a second. (Jain et al., "Checkmate", MLSys 2020, also solve
for when each value is recomputed, which takes hours.)
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

GAP = 1e-3
"""The relative tolerance: a solution may take longer than the best one by this share."""

_GRAIN = 1e-4
"""The share of the room to which the least excess is found."""

_MAX_NODES = 10_000
"""The most nodes of a search, hundreds of times what stages have needed."""

HIDDEN = 1e-3
"""The share of its time that an overlapped copy counts, so that no more is copied than is useful."""

_ATTEMPTS = 4
"""How often a solution that exceeds the room by rounding is recomputed with less room."""


@dataclass(frozen=True, slots=True)
class ForwardValue:
    """A forward value of one microbatch, and the ``seconds`` that recomputing it from its ``inputs`` takes.

    ``is_needed``: the backward reads it. Views and tuples of values do not have ``may_save``: only their
    sources take memory. Received values, for example, are not ``is_recomputable``; values whose memory others
    hold as well do not have ``may_offload``.
    """

    num_bytes: float
    seconds: float = 0.0
    inputs: tuple[int, ...] = ()
    is_needed: bool = False
    may_save: bool = True
    is_recomputable: bool = True
    may_offload: bool = False


StageValues = tuple[ForwardValue, ...]
"""The values of a stage. Inputs are earlier positions in the tuple."""


@dataclass(frozen=True, slots=True)
class MemoryConstraint:
    """The memory limit of a rank while one of its computes runs.

    ``saved[k]`` microbatches hold saved values of stage k of the rank, and ``recomputed[k]`` recomputed ones.
    Of the former, ``offloaded[k]`` have their offloaded values on the host. ``room`` is the limit in bytes.
    """

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    room: float
    offloaded: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OffloadCost:
    """The cost of offloading a microbatch's values.

    Copies of up to ``free_bytes`` overlap computes; each byte above that takes ``seconds_per_byte`` in each
    direction.
    """

    free_bytes: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        beyond = max(num_bytes - self.free_bytes, 0.0)
        return 2 * self.seconds_per_byte * (beyond + HIDDEN * num_bytes)


@dataclass(frozen=True, slots=True)
class RecomputeSolution:
    """The values of stage k that are ``recomputed[k]`` and ``offloaded[k]``; other needed ones are saved.

    ``seconds`` is the cost for a microbatch.
    """

    recomputed: tuple[frozenset[int], ...]
    offloaded: tuple[frozenset[int], ...]
    seconds: float

    def held_bytes(self, stages: Sequence[StageValues], moment: MemoryConstraint) -> float:
        """The bytes that the rank holds in the situation of a constraint."""
        total, counts = 0.0, zip(moment.saved, moment.recomputed, moment.offloaded, strict=True)
        chosen = zip(stages, self.recomputed, self.offloaded, strict=True)
        for (stage, recomputed, offloaded), (saved, again, away) in zip(chosen, counts, strict=True):
            total += saved * sum(stage[v].num_bytes for v in saved_values(stage, recomputed))
            total += again * sum(stage[v].num_bytes for v in recomputed if stage[v].is_needed)
            total -= away * sum(stage[v].num_bytes for v in offloaded)
        return total

    def excess_bytes(self, stages: Sequence[StageValues], moments: Sequence[MemoryConstraint]) -> float:
        """The largest excess over a room, in bytes; negative if all constraints hold."""
        return max((self.held_bytes(stages, moment) - moment.room for moment in moments), default=0.0)


def saved_values(stage: StageValues, recomputed: frozenset[int]) -> set[int]:
    """The values that are saved if ``recomputed`` are recomputed."""
    needed = {v for v, value in enumerate(stage) if value.is_needed}
    needed.update(*(stage[v].inputs for v in recomputed))
    return needed - recomputed


@functools.lru_cache(maxsize=256)
def minimize_seconds(
    stages: tuple[StageValues, ...], moments: tuple[MemoryConstraint, ...], host: OffloadCost | None = None
) -> RecomputeSolution | None:
    """The fastest choice within the room of every constraint, up to ``GAP``; None if there is none.

    Without a ``host`` nothing is offloaded.
    """
    rooms, program = np.array([moment.room for moment in moments]), RecomputeProgram(stages, moments, host)
    for _ in range(_ATTEMPTS):
        choice = program.fastest(rooms)
        if choice is None:
            return None
        over = np.array([choice.held_bytes(stages, moment) - moment.room for moment in moments])
        if not (over > 0).any():
            return choice
        rooms = rooms - np.maximum(over, 0)
    return None


@functools.lru_cache(maxsize=256)
def minimize_excess(
    stages: tuple[StageValues, ...], moments: tuple[MemoryConstraint, ...], host: OffloadCost | None = None
) -> RecomputeSolution:
    """The choice with the least excess over the rooms; of such choices, the fastest."""
    choice = RecomputeProgram(stages, moments, host).smallest()
    excess = max(choice.excess_bytes(stages, moments), 0.0)
    eased = tuple(replace(moment, room=moment.room + excess) for moment in moments)
    return minimize_seconds(stages, eased, host) or choice


class RecomputeProgram:
    """The integer program over all stages of a rank.

    Its variables are r of all values, d of all values, and o of those that may be offloaded. ``memory`` has a
    row for each moment.
    """

    def __init__(
        self,
        stages: Sequence[StageValues],
        moments: Sequence[MemoryConstraint],
        host: OffloadCost | None = None,
    ) -> None:
        self._stages, self._host = stages, host
        self._firsts = [0, *itertools.accumulate(map(len, stages))]
        self._values = [value for stage in stages for value in stage]
        self._rooms = np.array([moment.room for moment in moments])
        self._unit = max(float(np.abs(self._rooms).max(initial=0)), *self._sizes, 1.0)
        self._able = [v for v, value in enumerate(self._values) if value.may_offload and host]
        self._movable = np.array([self._values[v].num_bytes for v in self._able])
        self._num_variables = 2 * len(self._values) + len(self._able)
        self._memory = scipy.sparse.csr_array(
            np.array([self._row(moment) for moment in moments]).reshape(-1, self._num_variables)
        )
        self._order = self._dependencies()

    def fastest(self, rooms: np.ndarray) -> RecomputeSolution | None:
        seconds = np.array([value.seconds for value in self._values])
        objective, rooms = np.concatenate([seconds, np.zeros(len(self._values))]), rooms / self._unit
        if not (self._host and self._able):
            return self._solve(objective, self._memory, rooms, self._order)
        copying = 2 * self._host.seconds_per_byte * self._movable
        unit, nothing = self._movable.sum() or 1.0, np.zeros(len(objective))
        copied, free = np.concatenate([nothing, self._movable / unit]), self._host.free_bytes / unit
        found = [
            self._solve(
                np.concatenate([objective, price * copying]),
                scipy.sparse.vstack([self._memory, scipy.sparse.csr_array([side * copied])]),
                np.append(rooms, side * free),
                self._order,
            )
            for side, price in ((1, HIDDEN), (-1, 1 + HIDDEN))
        ]
        return min(filter(None, found), key=lambda choice: choice.seconds, default=None)

    def smallest(self) -> RecomputeSolution:
        """Minimise one more variable, the largest excess in small units of memory.

        It is an integer too: HiGHS prints to the process's output otherwise.
        """
        memory, order = (
            scipy.sparse.hstack([rows, np.full((rows.shape[0], 1), coefficient)])
            for rows, coefficient in ((self._memory, -_GRAIN), (self._order, 0.0))
        )
        objective = np.zeros(self._num_variables + 1)
        objective[-1] = 1.0
        found = self._solve(objective, memory, self._rooms / self._unit, order)
        assert found is not None, "without a limit there is always a solution"
        return found

    def _solve(
        self,
        objective: np.ndarray,
        memory: "scipy.sparse.csr_array",
        rooms: np.ndarray,
        order: "scipy.sparse.csr_array",
    ) -> RecomputeSolution | None:
        num_values = len(self._values)
        if not num_values:
            nothing = tuple(frozenset[int]() for _ in self._stages)
            return RecomputeSolution(nothing, nothing, 0.0) if (rooms >= 0).all() else None
        lower, upper = np.zeros(len(objective)), np.ones(len(objective))
        upper[:num_values] = [value.is_recomputable for value in self._values]
        lower[num_values : 2 * num_values] = [value.is_needed for value in self._values]
        lower[self._num_variables :], upper[self._num_variables :] = -np.inf, np.inf
        scale = np.abs(objective).max(initial=0.0) or 1.0
        found = scipy.optimize.milp(
            objective / scale,
            integrality=np.ones(len(objective)),
            bounds=scipy.optimize.Bounds(lower, upper),
            constraints=scipy.optimize.LinearConstraint(
                scipy.sparse.vstack([memory, order]),
                -np.inf,
                np.concatenate([rooms, np.zeros(order.shape[0])]),
            ),
            options={"mip_rel_gap": GAP, "node_limit": _MAX_NODES},
        )
        if found.x is None:
            return None
        moved = np.zeros(num_values, bool)
        moved[self._able] = found.x[2 * num_values : self._num_variables] > 0.5
        return self._choice(found.x[:num_values] > 0.5, moved)

    def _choice(self, again: np.ndarray, moved: np.ndarray) -> RecomputeSolution:
        """The solution, without values that are recomputed or ``moved`` but not needed."""

        def of_stages(chosen: np.ndarray) -> list[frozenset[int]]:
            return [
                frozenset(np.flatnonzero(chosen[first:end]).tolist())
                for first, end in itertools.pairwise(self._firsts)
            ]

        recomputed = tuple(map(needed_recomputes, self._stages, of_stages(again)))
        saved = map(saved_values, self._stages, recomputed)
        offloaded = tuple(chosen & own for chosen, own in zip(of_stages(moved), saved, strict=True))
        return self._counted(recomputed, offloaded)

    def _counted(
        self, recomputed: tuple[frozenset[int], ...], offloaded: tuple[frozenset[int], ...]
    ) -> RecomputeSolution:
        def total(chosen: Sequence[frozenset[int]], amount: Callable[[ForwardValue], float]) -> float:
            pairs = zip(self._stages, chosen, strict=True)
            return sum(amount(stage[v]) for stage, values in pairs for v in sorted(values))

        seconds = total(recomputed, lambda value: value.seconds)
        if self._host:
            seconds += self._host.seconds(total(offloaded, lambda value: value.num_bytes))
        return RecomputeSolution(recomputed, offloaded, seconds)

    @property
    def _sizes(self) -> Iterator[float]:
        return (value.num_bytes for value in self._values)

    def _row(self, moment: MemoryConstraint) -> np.ndarray:
        """The bytes that each variable adds: d is saved unless r is 1, and on the host if o is."""
        sizes = np.array([value.num_bytes * value.may_save for value in self._values])
        needed = np.array([value.num_bytes * value.is_needed for value in self._values])
        saved, again, away = (
            np.repeat(count, np.diff(self._firsts))
            for count in (moment.saved, moment.recomputed, moment.offloaded)
        )
        moved = -away[self._able] * self._movable
        return np.concatenate([again * needed - saved * sizes, saved * sizes, moved]) / self._unit

    def _dependencies(self) -> "scipy.sparse.csr_array":
        """A row r[v] - d[u] <= 0 for v and each input u of v, and d[v] - r[v] <= 0 if v cannot be saved.

        Then a row o[v] + r[v] - d[v] <= 0 for each value that may be offloaded.
        """
        num_values = len(self._values)
        pairs = [
            (v, num_values + first + u)
            for stage, first in zip(self._stages, self._firsts, strict=False)
            for v, value in enumerate(stage, first)
            for u in {*value.inputs, v - first}
        ]
        unsaved = [(num_values + v, v) for v, value in enumerate(self._values) if not value.may_save]
        columns = np.array(pairs + unsaved, dtype=np.int64).reshape(-1)
        num_rows = len(columns) // 2
        signs, rows = np.tile([1.0, -1.0], num_rows), np.arange(num_rows).repeat(2)
        able, count = np.array(self._able, np.int64), len(self._able)
        moved = np.stack([2 * num_values + np.arange(count), able, able + num_values], axis=1).reshape(-1)
        signs = np.concatenate([signs, np.tile([1.0, 1.0, -1.0], count)])
        rows = np.concatenate([rows, (num_rows + np.arange(count)).repeat(3)])
        shape = num_rows + count, self._num_variables
        return scipy.sparse.csr_array((signs, (rows, np.concatenate([columns, moved]))), shape)


def needed_recomputes(stage: StageValues, chosen: frozenset[int]) -> frozenset[int]:
    """The ``chosen`` values that the backward needs, or that another needed one of them reads."""
    needed = {v for v, value in enumerate(stage) if value.is_needed}
    for v in reversed(range(len(stage))):
        if v in needed and v in chosen:
            needed.update(stage[v].inputs)
    return frozenset(needed & chosen)
