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

Copies that overlap computes are free. So one more variable counts the bytes that are copied beyond these:

    sum of bytes[v] * o[v] - e <= free bytes

Without these and the rooms the matrix is that of a network, so that the relaxation is nearly integral: a
stage of a thousand values takes about a tenth of a second. (Jain et al., "Checkmate", MLSys 2020, also solve
for when each value is recomputed, which takes hours.)
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

GAP = 1e-3
"""The relative tolerance: a solution may take longer than the best one by this share."""

_GRAINS = 1 << 15
"""The precision of bytes that are copied, in parts of all: a whole number, for HiGHS prints otherwise."""

_MAX_NODES = 10_000
"""The most nodes of a search, hundreds of times what stages have needed."""

HIDDEN = 1e-3
"""The share of its time that an overlapped copy counts, so that no more is copied than is useful."""

_CHOICES = 4
"""How many different choices equal stages make at most, so that a rank may have any number of them."""

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


@dataclass(frozen=True, slots=True)
class RecomputeSolution:
    """The values of stage k that are ``recomputed[k]`` and ``offloaded[k]``; other needed ones are saved."""

    recomputed: tuple[frozenset[int], ...]
    offloaded: tuple[frozenset[int], ...]

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

    Without a ``host`` nothing is offloaded. Of many equal stages, several make the same choice.
    """
    alike, cost = _alike(stages), host or OffloadCost(0.0, 0.0)
    values = [value for members in alike for value in stages[members[0]]]
    rooms = np.array([moment.room for moment in moments])
    if not values:
        nothing = tuple(frozenset[int]() for _ in stages)
        return RecomputeSolution(nothing, nothing) if (rooms >= 0).all() else None
    lengths = [len(stages[members[0]]) for members in alike]
    firsts, num = [0, *itertools.accumulate(lengths)], len(values)
    times = np.repeat([len(members) for members in alike], lengths)
    sizes, needed, saves, recomputes, offloads = np.array(
        [
            (v.num_bytes, v.is_needed, v.may_save, v.is_recomputable, v.may_offload and bool(host))
            for v in values
        ]
    ).T
    counts = np.array([(m.saved, m.recomputed, m.offloaded) for m in moments])
    of_alike = [counts.reshape(-1, 3, len(stages))[:, :, members].sum(2) for members in alike]
    saved, again, away = np.repeat(np.stack(of_alike), lengths, axis=0).transpose(2, 1, 0) * sizes
    none = np.zeros((len(moments), 1))
    memory = np.hstack([again * needed - saved * saves, saved * saves, -away, none])
    copies = 2 * cost.seconds_per_byte * times * sizes * offloads
    movable = max(float((times * sizes * offloads).sum()), 1.0)
    copied = np.concatenate([np.zeros(2 * num), times * sizes * offloads / movable, [-1 / _GRAINS]])
    seconds = np.concatenate(
        [
            times * [value.seconds * value.is_recomputable for value in values],
            np.zeros(num),
            HIDDEN * copies,
            [2 * cost.seconds_per_byte * movable / _GRAINS],
        ]
    )
    unit = max(float(np.abs(rooms).max(initial=0)), float(sizes.max()), 1.0)
    rows = scipy.sparse.vstack(
        [
            scipy.sparse.csr_array(np.vstack([memory / unit, copied])),
            _dependencies([stages[members[0]] for members in alike], firsts),
        ]
    )
    bounds = scipy.optimize.Bounds(
        np.concatenate([np.zeros(num), needed, np.zeros(num + 1)]),
        np.concatenate([recomputes, np.ones(num), offloads, [_GRAINS]]),
    )
    for _ in range(_ATTEMPTS):
        limits = np.append(rooms / unit, cost.free_bytes / movable)
        found = scipy.optimize.milp(
            seconds / (seconds.max() or 1.0),
            integrality=np.ones(len(seconds)),
            bounds=bounds,
            constraints=scipy.optimize.LinearConstraint(
                rows, -np.inf, np.concatenate([limits, np.zeros(rows.shape[0] - len(limits))])
            ),
            options={"mip_rel_gap": GAP, "node_limit": _MAX_NODES},
        )
        if found.x is None:
            return None
        chosen = found.x[:-1].reshape(3, num) > 0.5
        choice = _choice(stages, alike, np.split(chosen, firsts[1:-1], axis=1))
        over = np.array([choice.held_bytes(stages, moment) - moment.room for moment in moments])
        if not (over > 0).any():
            return choice
        rooms = rooms - np.maximum(over, 0)
    return None


def _alike(stages: Sequence[StageValues]) -> list[list[int]]:
    """The numbers of the stages; those in one list are equal. Equal ones are in up to ``_CHOICES`` lists."""
    equal: dict[StageValues, list[int]] = {}
    for number, stage in enumerate(stages):
        equal.setdefault(stage, []).append(number)
    divided = (np.array_split(numbers, min(len(numbers), _CHOICES)) for numbers in equal.values())
    return sorted(part.tolist() for parts in divided for part in parts)


def _dependencies(stages: Sequence[StageValues], firsts: Sequence[int]) -> "scipy.sparse.csr_array":
    """A row r[v] - d[u] <= 0 for v and each input u of v, and d[v] - r[v] <= 0 if v cannot be saved.

    Then a row o[v] + r[v] - d[v] <= 0 for each value.
    """
    num, columns, signs = firsts[-1], list[list[int]](), list[list[float]]()
    for stage, first in zip(stages, firsts, strict=False):
        for v, value in enumerate(stage, first):
            columns += [[v, num + first + u] for u in {*value.inputs, v - first}]
            columns += [] if value.may_save else [[num + v, v]]
            signs += [[1.0, -1.0]] * (len(columns) - len(signs))
            columns.append([2 * num + v, v, num + v])
            signs.append([1.0, 1.0, -1.0])
    numbers = np.repeat(np.arange(len(columns)), [*map(len, columns)])
    entries = [*itertools.chain(*signs)], (numbers, [*itertools.chain(*columns)])
    return scipy.sparse.csr_array(entries, (len(columns), 3 * num + 1))


def _choice(
    stages: Sequence[StageValues],
    alike: Sequence[Sequence[int]],
    chosen: Sequence["np.typing.NDArray[np.bool_]"],
) -> RecomputeSolution:
    """The solution, without values that are recomputed or offloaded but not needed.

    The rows of ``chosen[k]`` say what the stages ``alike[k]`` recompute, need and offload.
    """
    recomputed, offloaded = ([frozenset[int]()] * len(stages) for _ in range(2))
    for members, (again, _, away) in zip(alike, chosen, strict=True):
        stage = stages[members[0]]
        own = needed_recomputes(stage, frozenset(np.flatnonzero(again).tolist()))
        moved = frozenset(np.flatnonzero(away).tolist()) & saved_values(stage, own)
        for number in members:
            recomputed[number], offloaded[number] = own, moved
    return RecomputeSolution(tuple(recomputed), tuple(offloaded))


def needed_recomputes(stage: StageValues, chosen: frozenset[int]) -> frozenset[int]:
    """The ``chosen`` values that the backward needs, or that another needed one of them reads."""
    needed = {v for v, value in enumerate(stage) if value.is_needed}
    for v in reversed(range(len(stage))):
        if v in needed and v in chosen:
            needed.update(stage[v].inputs)
    return frozenset(needed & chosen)
