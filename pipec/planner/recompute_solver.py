"""Which values of the forward a rank saves for its backward, which wait on the host, and which it replays.

A value is *saved*, *recomputed*, or neither if nobody asks for it. The backward asks for some values, and a
value that is recomputed asks for its inputs. What is saved may be *offloaded*: some of the microbatches in
flight then have it in host memory. Of all choices within memory, one is taken that takes the least time (an
integer program, solved by HiGHS)::

    minimise    sum of seconds[v] * r[v], and what copies take
    so that     d[v] = 1              if the backward reads v
                d[v] >= r[v]          v is recomputed only if needed, and saved if needed and not recomputed:
                d[u] >= r[v]          d[v] - r[v] says so. u is an input of v
                d[v] - r[v] >= o[v]   v is offloaded only if it is saved
                at each moment: what is saved, times the microbatches in flight, without what is offloaded,
                                times those that are offloaded, and what is recomputed <= room

Copies beside computes are free, so that what copies take has a bend. It is solved for either side of it::

    sum of bytes[v] * o[v] <= free      copies take next to nothing
    sum of bytes[v] * o[v] >= free      what is above takes its time on the way there and back

Without these and the rooms the matrix is that of a network, so that the relaxation is nearly integral: a
stage of a thousand values takes about a tenth of a second. (Jain et al., "Checkmate", MLSys 2020, solve for
when each value is recomputed as well, which takes hours.)
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, hstack, vstack

GAP = 1e-3
"""A choice may take longer than the best one by this share."""

_GRAIN = 1e-4
"""The share of the room to which the least excess is found."""

_MOST_NODES = 10_000
"""So many nodes of a search are looked at, which is hundreds of times what stages have needed."""

HIDDEN = 1e-3
"""A copy beside a compute counts for this share of its time, so that no more is copied than is of use."""

_ATTEMPTS = 4
"""How often a solution that rounding put above the room is sought again below it."""


@dataclass(frozen=True, slots=True)
class ForwardValue:
    """A value of the forward of one microbatch, and what replaying it takes besides its ``inputs``.

    ``is_needed``: the backward reads it. What ``may_save`` excludes is a view, or a tuple of values: it costs
    memory only through those it is made of. What ``is_recomputable`` excludes was received, for example, and
    what ``may_offload`` excludes is held for others, too.
    """

    num_bytes: float
    seconds: float = 0.0
    inputs: tuple[int, ...] = ()
    is_needed: bool = False
    may_save: bool = True
    is_recomputable: bool = True
    may_offload: bool = False


StageValues = tuple[ForwardValue, ...]
"""The values of a stage. Inputs are positions in the tuple, and come before what is made of them."""


@dataclass(frozen=True, slots=True)
class MemoryConstraint:
    """What a rank holds while one of its computes runs.

    It is what ``saved[k]`` microbatches have saved of stage k of the rank, and what ``recomputed[k]`` have
    recomputed. Of those that have saved, ``offloaded[k]`` have on the host what is offloaded. ``room`` are
    the bytes that the rank may have.
    """

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    room: float
    offloaded: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OffloadCost:
    """What it takes to offload bytes of a microbatch.

    Copies of up to ``free_bytes`` overlap computes; each byte above that takes ``seconds_per_byte``, each
    way.
    """

    free_bytes: float
    seconds_per_byte: float

    def seconds(self, num_bytes: float) -> float:
        beyond = max(num_bytes - self.free_bytes, 0.0)
        return 2 * self.seconds_per_byte * (beyond + HIDDEN * num_bytes)


@dataclass(frozen=True, slots=True)
class RecomputeSolution:
    """``recomputed[k]`` are the values of stage k that are computed again; what else is asked for is saved.

    Of these, ``offloaded[k]`` wait on the host. All that takes ``seconds`` for a microbatch.
    """

    recomputed: tuple[frozenset[int], ...]
    offloaded: tuple[frozenset[int], ...]
    seconds: float

    def held_bytes(self, stages: Sequence[StageValues], moment: MemoryConstraint) -> float:
        """The bytes that a moment takes."""
        total, counts = 0.0, zip(moment.saved, moment.recomputed, moment.offloaded, strict=True)
        chosen = zip(stages, self.recomputed, self.offloaded, strict=True)
        for (stage, recomputed, offloaded), (saved, again, away) in zip(chosen, counts, strict=True):
            total += saved * sum(stage[v].num_bytes for v in saved_values(stage, recomputed))
            total += again * sum(stage[v].num_bytes for v in recomputed if stage[v].is_needed)
            total -= away * sum(stage[v].num_bytes for v in offloaded)
        return total

    def excess_bytes(self, stages: Sequence[StageValues], moments: Sequence[MemoryConstraint]) -> float:
        """By how many bytes the worst moment is above its room; below 0 if all are within."""
        return max((self.held_bytes(stages, moment) - moment.room for moment in moments), default=0.0)


def saved_values(stage: StageValues, recomputed: frozenset[int]) -> set[int]:
    """The values that are saved if those of ``recomputed`` are computed again."""
    needed = {v for v, value in enumerate(stage) if value.is_needed}
    needed.update(*(stage[v].inputs for v in recomputed))
    return needed - recomputed


@functools.lru_cache(maxsize=256)
def minimize_seconds(
    stages: tuple[StageValues, ...], moments: tuple[MemoryConstraint, ...], host: OffloadCost | None = None
) -> RecomputeSolution | None:
    """The choice that takes the least time and is within the room of every moment; None without one.

    The time is the least up to ``GAP``. Without a ``host`` nothing is offloaded.
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
        self._memory = csr_array(
            np.array([self._row(moment) for moment in moments]).reshape(-1, self._num_variables)
        )
        self._order = self._order_of_asking()

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
                vstack([self._memory, csr_array([side * copied])]),
                np.append(rooms, side * free),
                self._order,
            )
            for side, price in ((1, HIDDEN), (-1, 1 + HIDDEN))
        ]
        return min(filter(None, found), key=lambda choice: choice.seconds, default=None)

    def smallest(self) -> RecomputeSolution:
        """Minimises one more variable, the excess of the worst moment in small units of memory.

        It is an integer as well: HiGHS writes to the output of the process where it is not.
        """
        memory, order = (
            hstack([rows, np.full((rows.shape[0], 1), coefficient)])
            for rows, coefficient in ((self._memory, -_GRAIN), (self._order, 0.0))
        )
        objective = np.zeros(self._num_variables + 1)
        objective[-1] = 1.0
        found = self._solve(objective, memory, self._rooms / self._unit, order)
        assert found is not None, "without a limit there is always a choice"
        return found

    def _solve(
        self,
        objective: np.ndarray,
        memory: csr_array,
        rooms: np.ndarray,
        order: csr_array,
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
        found = milp(
            objective / scale,
            integrality=np.ones(len(objective)),
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(
                vstack([memory, order]), -np.inf, np.concatenate([rooms, np.zeros(order.shape[0])])
            ),
            options={"mip_rel_gap": GAP, "node_limit": _MOST_NODES},
        )
        if found.x is None:
            return None
        moved = np.zeros(num_values, bool)
        moved[self._able] = found.x[2 * num_values : self._num_variables] > 0.5
        return self._choice(found.x[:num_values] > 0.5, moved)

    def _choice(self, again: np.ndarray, moved: np.ndarray) -> RecomputeSolution:
        """Of the values that are to be computed ``again``, or ``moved``, those that are asked for."""

        def of_stages(chosen: np.ndarray) -> list[frozenset[int]]:
            return [
                frozenset(np.flatnonzero(chosen[first:end]).tolist())
                for first, end in itertools.pairwise(self._firsts)
            ]

        recomputed = tuple(map(needed_recomputes, self._stages, of_stages(again)))
        saved = map(saved_values, self._stages, recomputed)
        offloaded = tuple(chosen & kept for chosen, kept in zip(of_stages(moved), saved, strict=True))
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
        """What each variable adds to the bytes of a moment: d is saved unless r is 1, and away if o is."""
        sizes = np.array([value.num_bytes * value.may_save for value in self._values])
        needed = np.array([value.num_bytes * value.is_needed for value in self._values])
        saved, again, away = (
            np.repeat(count, np.diff(self._firsts))
            for count in (moment.saved, moment.recomputed, moment.offloaded)
        )
        moved = -away[self._able] * self._movable
        return np.concatenate([again * needed - saved * sizes, saved * sizes, moved]) / self._unit

    def _order_of_asking(self) -> csr_array:
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
        return csr_array((signs, (rows, np.concatenate([columns, moved]))), shape)


def needed_recomputes(stage: StageValues, chosen: frozenset[int]) -> frozenset[int]:
    """Of the values that may be recomputed, those that the backward needs or that another of them reads."""
    asked = {v for v, value in enumerate(stage) if value.is_needed}
    for v in reversed(range(len(stage))):
        if v in asked and v in chosen:
            asked.update(stage[v].inputs)
    return frozenset(asked & chosen)
