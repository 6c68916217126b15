"""The best pipeline on a hierarchy of devices: exact dynamic programming over boundaries and devices.

Inside a group, the best pipeline from boundary b to boundary e on given numbers of members of each kind
takes the least, over the first stage's last boundary x, kind and replicas, of the larger of that stage's
seconds and those of the best pipeline from x to e on the members that are left. With all members at work
the group is one device of the level above (PipeDream, Narayanan et al., SOSP 2019, section 3.1).

Memory depends on how many devices follow a stage, which is why stages are chosen from the last to the first.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import numpy as np

from pipec.planner.boundaries import Vector
from pipec.planner.ranges import Indices, Matrix, Ranges, between
from pipec.planner.topology import Group, Leaf, Member

_ROWS = 64

_MOST_REMEMBERED = 1 << 24
"""So many costs are worth keeping, if it saves working them out for some boundaries at a time."""

Counts = tuple[int, ...]
"""How many members of each kind."""

Useful = Callable[[int], Indices]
"""The boundaries at which a plan may have so many devices of the outermost group left."""


class Chosen(NamedTuple):
    """A stage from boundary ``first`` to boundary ``last``, with a replica on each of ``devices``.

    Seconds are per microbatch and count what the stage has to do with at every level. ``after`` is the
    number of later devices for each replica.
    """

    first: int
    last: int
    devices: tuple[int, ...]
    seconds: float
    communication_seconds: float
    after: Fraction


class _Option(NamedTuple):
    """A stage on ``replicas`` members of a kind, with the members ``rest`` for all later stages."""

    kind: int
    replicas: int
    rest: Counts


class _Task(NamedTuple):
    """What is between two boundaries, on ``group``, with ``after`` later devices for each replica of it.

    ``begins``: a stage at ``first`` is the first of its group.
    """

    group: Group
    first: int
    last: int
    after: Fraction
    useful: Useful
    begins: bool = True


class _FirstStage(NamedTuple):
    cost: float
    option: _Option
    last: int


_Cost = Callable[[_Option, bool, Indices, Indices], Matrix]
"""Of stages with an option, the first of their group or not, between rows and columns of boundaries."""


@dataclass(frozen=True)
class Hierarchy:
    """Stages of ``ranges`` on groups of devices, each on ``max_replicas`` members of a group at most.

    ``every_device``: none may stay unused.
    """

    ranges: Ranges
    max_replicas: int
    limits_memory: bool
    every_device: bool
    _known: dict[object, Matrix] = field(default_factory=dict, repr=False)

    def pipeline(self, group: Group, useful: Useful) -> tuple[Chosen, ...]:
        """The fastest stages for everything, none if they do not fit in memory.

        Of these the ones on the fewest members; of these the ones that communicate least, in seconds.
        ``useful`` has to name every boundary that a fastest plan may use.
        """
        return self._solve(_Task(group, 0, len(self.ranges.boundaries) - 1, Fraction(0), useful))

    def _solve(self, task: _Task) -> tuple[Chosen, ...]:
        seconds = self._remembering(task.group, functools.partial(self._stage, task.group, task.after))
        finish = self._finish(task, seconds, np.maximum)
        fastest = {
            counts: self._first_stage(task, counts, finish, seconds, np.maximum).cost
            for counts in _all_counts(task.group)
            if task.first in task.useful(_num_devices(task.group, counts))
            and self._may_take(task.group, counts)
        }
        limit = min(fastest.values())
        if limit == np.inf:
            return ()
        enough = [counts for counts, least in fastest.items() if least == limit]
        counts = min(enough, key=lambda counts: _num_devices(task.group, counts))

        def communication(option: _Option, begins: bool, rows: Indices, columns: Indices) -> Matrix:
            spent = self.ranges.communication(task.group.level, option.replicas, begins, rows, columns)
            return np.where(seconds(option, begins, rows, columns) <= limit, spent, np.inf)

        in_time = task._replace(useful=_in_time(task, finish, limit))
        return self._follow(in_time, counts, self._remembering(task.group, communication))

    def _follow(self, task: _Task, counts: Counts, cost: _Cost) -> tuple[Chosen, ...]:
        """The stages with the least sum of ``cost`` on ``counts`` members, from the first to the last."""
        finish = self._finish(task, cost, np.add)
        unused = [iter(kind) for kind in task.group.kinds]
        stages: list[Chosen] = []
        while task.first != task.last:
            while not (task.begins or self.every_device) and (fewer := _as_good(counts, finish, task.first)):
                counts = fewer
            _, option, last = self._first_stage(task, counts, finish, cost, np.add)
            members = [next(unused[option.kind]) for _ in range(option.replicas)]
            stages += self._placed(task, option, last, members)
            task, counts = task._replace(first=last, begins=False), option.rest
        return tuple(stages)

    def _finish(self, task: _Task, cost: _Cost, join: np.ufunc) -> dict[Counts, Vector]:
        """The least cost from every boundary to the task's last, on up to so many members of each kind."""
        best: dict[Counts, Vector] = {}
        for counts in _all_counts(task.group):
            rows = task.useful(_num_devices(task.group, counts))
            least = np.full(len(self.ranges.boundaries), np.inf)
            least[task.last] = 0.0 if self._may_leave(counts) else np.inf
            for fewer in self._fewer(counts):
                np.minimum(least, best[fewer], out=least)
            for option in self._options(counts):
                columns = task.useful(_num_devices(task.group, option.rest))
                found = _least(join, cost(option, False, rows, columns), best[option.rest][columns])
                least[rows] = np.minimum(least[rows], found)
            best[counts] = least
        return best

    def _first_stage(
        self, task: _Task, counts: Counts, finish: dict[Counts, Vector], cost: _Cost, join: np.ufunc
    ) -> _FirstStage:
        """The first stage of the task, and all it costs, on ``counts`` members, as many of them as needed."""
        best = _FirstStage(np.inf, _Option(0, 0, counts), task.last)
        for option in self._options(counts):
            columns = task.useful(_num_devices(task.group, option.rest))
            row = cost(option, task.begins, np.array([task.first]), columns)
            costs = join(row, finish[option.rest][columns])[0]
            if costs.min(initial=np.inf) < best.cost:
                best = _FirstStage(float(costs.min()), option, int(columns[costs.argmin()]))
        return best

    def _placed(self, task: _Task, option: _Option, last: int, members: Sequence[Member]) -> Iterator[Chosen]:
        """The stage itself, or the stages within each of its replicas, with the share of this level added."""
        after = _later(task.group, task.after, option)
        inside = self._inside(members[0], task.first, last, after)
        span = (task.group.level, option.replicas, task.begins, np.array([task.first]), np.array([last]))
        for stage in inside:
            busy = np.array([[stage.seconds]])
            spent = stage.communication_seconds / option.replicas
            yield stage._replace(
                devices=_counterparts(stage.devices, members),
                seconds=float(self.ranges.stage(busy, *span)[0, 0]),
                communication_seconds=spent + float(self.ranges.communication(*span)[0, 0]),
            )

    def _inside(self, member: Member, first: int, last: int, after: Fraction) -> tuple[Chosen, ...]:
        if isinstance(member, Group):
            return self._solve(_Task(member, first, last, after, self._everywhere))
        busy = self._busy(member, after, np.array([first]), np.array([last]))
        return (Chosen(first, last, (member.index,), float(busy[0, 0]), 0.0, after),)

    def _everywhere(self, num_devices: int) -> Indices:
        return np.arange(len(self.ranges.boundaries))

    def _stage(
        self, group: Group, after: Fraction, option: _Option, begins: bool, rows: Indices, columns: Indices
    ) -> Matrix:
        busy = self._busy(group.kinds[option.kind][0], _later(group, after, option), rows, columns)
        return self.ranges.stage(busy, group.level, option.replicas, begins, rows, columns)

    def _busy(self, member: Member, after: Fraction, rows: Indices, columns: Indices) -> Matrix:
        """Seconds of the best pipeline on one ``member``."""
        if isinstance(member, Leaf):
            return self.ranges.on_device(member.device, after, rows, columns)
        key = (member.signature, after if self.limits_memory else None)
        if key not in self._known:
            self._known[key] = self._all_pipelines(member, after)
        return self._known[key][np.ix_(rows, columns)]

    def _all_pipelines(self, group: Group, after: Fraction) -> Matrix:
        """Seconds of the best pipeline on ``group`` between any two boundaries."""
        everywhere = self._everywhere(0)
        finish: dict[Counts, Matrix] = {}
        fastest = np.full((len(everywhere), len(everywhere)), np.inf)
        for counts in _all_counts(group):
            least = np.where(np.eye(len(everywhere), dtype=bool) & self._may_leave(counts), 0.0, np.inf)
            for fewer in self._fewer(counts):
                np.minimum(least, finish[fewer], out=least)
            for option in self._options(counts):
                for begins, found in ((False, least), (True, fastest)):
                    if begins and not self._may_take(group, counts):
                        continue
                    stages = self._stage(group, after, option, begins, everywhere, everywhere)
                    _minimise(found, stages, finish[option.rest])
            finish[counts] = least
        return fastest

    def _may_leave(self, counts: Counts) -> bool:
        """Whether so many members may be left when everything is done."""
        return not self.every_device or not any(counts)

    def _may_take(self, group: Group, counts: Counts) -> bool:
        """Whether a pipeline may be on so many members of a group."""
        return not self.every_device or counts == tuple(map(len, group.kinds))

    def _fewer(self, counts: Counts) -> Iterator[Counts]:
        """One member left unused."""
        return iter(()) if self.every_device else _one_fewer(counts)

    def _options(self, counts: Counts) -> Iterator[_Option]:
        for kind, most in enumerate(counts):
            for replicas in range(1, min(most, self.max_replicas) + 1):
                yield _Option(kind, replicas, (*counts[:kind], most - replicas, *counts[kind + 1 :]))

    def _remembering(self, group: Group, cost: _Cost) -> _Cost:
        """The same costs, those between all boundaries worked out only once; all of them if they are few."""
        known: dict[object, Matrix] = {}
        everywhere = self._everywhere(0)
        num_options = sum(min(len(kind), self.max_replicas) for kind in group.kinds)
        few = not self.limits_memory and num_options * len(everywhere) ** 2 <= _MOST_REMEMBERED

        def remembered(option: _Option, begins: bool, rows: Indices, columns: Indices) -> Matrix:
            key = (option.kind, option.replicas, begins, option.rest if self.limits_memory else ())
            all_of_them = len(rows) == len(columns) == len(everywhere)
            if key not in known and (all_of_them or (few and not begins)):
                known[key] = cost(option, begins, everywhere, everywhere)
            return between(known[key], rows, columns) if key in known else cost(option, begins, rows, columns)

        return remembered


def _all_counts(group: Group) -> Iterator[Counts]:
    """Every number of members of each kind, none of them first; fewer come before more."""
    return product(*(range(len(kind) + 1) for kind in group.kinds))


def _one_fewer(counts: Counts) -> Iterator[Counts]:
    for kind, count in enumerate(counts):
        if count:
            yield (*counts[:kind], count - 1, *counts[kind + 1 :])


def _as_good(counts: Counts, finish: dict[Counts, Vector], boundary: int) -> Counts | None:
    """One member fewer, if it costs no more to finish from ``boundary``."""
    cost = finish[counts][boundary]
    return next((fewer for fewer in _one_fewer(counts) if finish[fewer][boundary] == cost), None)


def _in_time(task: _Task, finish: dict[Counts, Vector], limit: float) -> Useful:
    """Of the useful boundaries, those from which the stages that are left can keep within the limit."""
    from_each: dict[int, Vector] = {}
    for counts, seconds in finish.items():
        num_devices = _num_devices(task.group, counts)
        from_each[num_devices] = np.minimum(from_each.get(num_devices, np.inf), seconds)

    @functools.cache
    def useful(num_devices: int) -> Indices:
        known = task.useful(num_devices)
        return known[from_each[num_devices][known] <= limit]

    return useful


def _num_devices(group: Group, counts: Counts) -> int:
    return sum(count * kind[0].num_devices for count, kind in zip(counts, group.kinds, strict=True))


def _later(group: Group, after: Fraction, option: _Option) -> Fraction:
    """Devices that follow each member of the option's stage."""
    return (after + _num_devices(group, option.rest)) / option.replicas


def _least(join: np.ufunc, costs: Matrix, rest: Vector) -> Vector:
    """For each row, the least ``join(costs[row, x], rest[x])``, a few rows at a time to stay in the cache."""
    blocks = (costs[row : row + _ROWS] for row in range(0, len(costs), _ROWS))
    return np.concatenate([np.empty(0), *(join(block, rest).min(axis=1, initial=np.inf) for block in blocks)])


def _minimise(found: Matrix, stages: Matrix, rest: Matrix) -> None:
    """Lower each ``found[b, e]`` to the least, over x, of ``max(stages[b, x], rest[x, e])``."""
    for b in range(len(found)):
        reached = np.flatnonzero(stages[b] < np.inf)
        slowest = np.maximum(stages[b, reached, None], rest[reached])
        np.minimum(found[b], slowest.min(axis=0, initial=np.inf), out=found[b])


def _counterparts(devices: Sequence[int], members: Sequence[Member]) -> tuple[int, ...]:
    """The devices that play the part of ``devices``, which are of the first member, in all ``members``."""
    position = {device: k for k, device in enumerate(members[0].device_indices)}
    return tuple(member.device_indices[position[device]] for member in members for device in devices)
