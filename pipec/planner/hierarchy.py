"""The best pipeline on a hierarchy of devices: exact dynamic programming over boundaries and devices.

Inside a group, the best pipeline from boundary b to boundary e on given numbers of members of each kind
takes the least, over the first stage's last boundary x, kind and replicas, of the larger of that stage's
seconds and those of the best pipeline from x to e on the members that are left. With all members at work
the group is one device of the level above (PipeDream, Narayanan et al., SOSP 2019, section 3.1).

Memory depends on how many devices follow a stage, which is why stages are chosen from the last to the first,
and why, where it is limited, a pipeline in a group may be asked for on some of the group's devices alone.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np

from pipec.planner.boundaries import Vector
from pipec.planner.groups import Group, Leaf, Member
from pipec.planner.ranges import Indices, Matrix, Ranges, between

Tensor = Matrix
"""Of three dimensions."""

_ROWS = 64

_MOST_REMEMBERED = 1 << 26
"""So many costs are worth keeping, if it saves working them out for some boundaries at a time."""

Counts = tuple[int, ...]
"""How many members of each kind."""

Useful = Callable[[int], Indices]
"""The boundaries at which a plan may have so many devices of the outermost group left."""


class Chosen(NamedTuple):
    """A stage from boundary ``first`` to boundary ``last``, with a replica on each of ``devices``.

    Seconds are per microbatch and count what the stage has to do with at every level. ``after`` is the
    number of later devices for each replica, rounded up.
    """

    first: int
    last: int
    devices: tuple[int, ...]
    seconds: float
    communication_seconds: float
    after: int


class _Left(NamedTuple):
    """What stages may use: ``members`` of each kind, ``devices`` of theirs at most."""

    members: Counts
    devices: int


class _Option(NamedTuple):
    """A stage on up to ``devices`` of each of ``replicas`` members; the ``rest`` is for later stages."""

    kind: int
    replicas: int
    devices: int
    rest: _Left


class _Task(NamedTuple):
    """What is between two boundaries, on up to ``devices`` of ``group``.

    ``after``: later devices for each replica of it, rounded up. ``begins``: a stage at ``first`` is the first
    of its group.
    """

    group: Group
    devices: int
    first: int
    last: int
    after: int
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

    ``minds_later``: whether a stage fits in memory depends on the devices that follow it.
    ``every_device``: none may stay unused.
    """

    ranges: Ranges
    max_replicas: int
    minds_later: bool
    every_device: bool
    _known: dict[object, Tensor] = field(default_factory=dict, repr=False)

    def pipeline(self, group: Group, useful: Useful) -> tuple[Chosen, ...]:
        """The fastest stages for everything, none if they do not fit in memory.

        Of these the ones on the fewest members; of these the ones that communicate least, in seconds.
        ``useful`` has to name every boundary that a fastest plan may use.
        """
        last = len(self.ranges.boundaries) - 1
        return self._solve(_Task(group, group.num_devices, 0, last, 0, useful))

    def _solve(self, task: _Task) -> tuple[Chosen, ...]:
        seconds = self._remembering(task.group, functools.partial(self._stage, task.group, task.after))
        finish = self._finish(task, seconds, np.maximum)
        fastest = {
            left: self._first_stage(task, left, finish, seconds, np.maximum).cost
            for left in finish
            if task.first in task.useful(left.devices) and self._may_take(task.group, left)
        }
        limit = min(fastest.values())
        if limit == np.inf:
            return ()
        enough = [left for left, least in fastest.items() if least == limit]
        fewest = min(enough, key=lambda left: (_num_devices(task.group, left.members), left.devices))

        def communication(option: _Option, begins: bool, rows: Indices, columns: Indices) -> Matrix:
            spent = self.ranges.communication(task.group.level, option.replicas, begins, rows, columns)
            return np.where(seconds(option, begins, rows, columns) <= limit, spent, np.inf)

        in_time = task._replace(useful=_in_time(task, finish, limit))
        return self._follow(in_time, fewest, self._remembering(task.group, communication))

    def _follow(self, task: _Task, left: _Left, cost: _Cost) -> tuple[Chosen, ...]:
        """The stages with the least sum of ``cost`` on what is ``left``, from the first to the last."""
        finish = self._finish(task, cost, np.add)
        unused = [iter(kind) for kind in task.group.kinds]
        stages: list[Chosen] = []
        while task.first != task.last:
            while not task.begins and (less := self._as_good(task, left, finish)):
                left = less
            _, option, last = self._first_stage(task, left, finish, cost, np.add)
            members = [next(unused[option.kind]) for _ in range(option.replicas)]
            stages += self._placed(task, option, last, members)
            task, left = task._replace(first=last, begins=False), option.rest
        return tuple(stages)

    def _finish(self, task: _Task, cost: _Cost, join: np.ufunc) -> dict[_Left, Vector]:
        """The least cost from every boundary to the task's last, with so much left."""
        best: dict[_Left, Vector] = {}
        for left in self._all_left(task.group, task.devices):
            rows = task.useful(left.devices)
            least = np.full(len(self.ranges.boundaries), np.inf)
            least[task.last] = 0.0 if self._may_remain(left) else np.inf
            for less in self._less(task.group, left):
                np.minimum(least, best[less], out=least)
            for option in self._options(task.group, left):
                columns = task.useful(option.rest.devices)
                stages = functools.partial(cost, option, False)
                found = _least(join, stages, rows, columns, best[option.rest][columns])
                least[rows] = np.minimum(least[rows], found)
            best[left] = least
        return best

    def _first_stage(
        self, task: _Task, left: _Left, finish: dict[_Left, Vector], cost: _Cost, join: np.ufunc
    ) -> _FirstStage:
        """The first stage of the task, and all it costs, with so much left, as much of it as needed."""
        best = _FirstStage(np.inf, _Option(0, 0, 0, left), task.last)
        for option in self._options(task.group, left):
            columns = task.useful(option.rest.devices)
            row = cost(option, task.begins, np.array([task.first]), columns)
            costs = join(row, finish[option.rest][columns])[0]
            if costs.min(initial=np.inf) < best.cost:
                best = _FirstStage(float(costs.min()), option, int(columns[costs.argmin()]))
        return best

    def _as_good(self, task: _Task, left: _Left, finish: dict[_Left, Vector]) -> _Left | None:
        """Less, if it costs no more to finish the task with it: ``useful`` may tell what that is."""
        cost = finish[left][task.first]
        return next((less for less in self._less(task.group, left) if finish[less][task.first] == cost), None)

    def _placed(self, task: _Task, option: _Option, last: int, members: Sequence[Member]) -> Iterator[Chosen]:
        """The stage itself, or the stages within each of its replicas, with the share of this level added."""
        inside = self._inside(members[0], task, option, last)
        span = (task.group.level, option.replicas, task.begins, np.array([task.first]), np.array([last]))
        for stage in inside:
            busy = np.array([[stage.seconds]])
            spent = stage.communication_seconds / option.replicas
            yield stage._replace(
                devices=_counterparts(stage.devices, members),
                seconds=float(self.ranges.stage(busy, *span)[0, 0]),
                communication_seconds=spent + float(self.ranges.communication(*span)[0, 0]),
            )

    def _inside(self, member: Member, task: _Task, option: _Option, last: int) -> tuple[Chosen, ...]:
        after = _later(task.after, option)
        if isinstance(member, Group):
            return self._solve(_Task(member, option.devices, task.first, last, after, self._everywhere))
        busy = self.ranges.on_device(member.device, after, np.array([task.first]), np.array([last]))
        return (Chosen(task.first, last, (member.index,), float(busy[0, 0]), 0.0, after),)

    def _everywhere(self, num_devices: int) -> Indices:
        return np.arange(len(self.ranges.boundaries))

    def _stage(
        self, group: Group, after: int, option: _Option, begins: bool, rows: Indices, columns: Indices
    ) -> Matrix:
        busy = self._busy(group.kinds[option.kind][0], option.devices, _later(after, option), rows, columns)
        return self.ranges.stage(busy, group.level, option.replicas, begins, rows, columns)

    def _busy(self, member: Member, devices: int, after: int, rows: Indices, columns: Indices) -> Matrix:
        """Seconds of the best pipeline on so many devices of one ``member``."""
        if isinstance(member, Leaf):
            return self.ranges.on_device(member.device, after, rows, columns)
        key = (member.signature, after if self.minds_later else None)
        if key not in self._known:
            self._known[key] = self._all_pipelines(member, after)
        return between(self._known[key][devices], rows, columns)

    def _all_pipelines(self, group: Group, after: int) -> Tensor:
        """Seconds of the best pipeline on up to so many devices of ``group`` between any two boundaries."""
        everywhere = self._everywhere(0)
        finish: dict[_Left, Matrix] = {}
        fastest = np.full((group.num_devices + 1, len(everywhere), len(everywhere)), np.inf)
        for left in self._all_left(group, group.num_devices):
            least = np.where(np.eye(len(everywhere), dtype=bool) & self._may_remain(left), 0.0, np.inf)
            for less in self._less(group, left):
                np.minimum(least, finish[less], out=least)
            for option in self._options(group, left):
                for begins, found in ((False, least), (True, fastest[left.devices])):
                    if begins and not self._may_take(group, left):
                        continue
                    stages = self._stage(group, after, option, begins, everywhere, everywhere)
                    _minimise(found, stages, finish[option.rest])
            finish[left] = least
        return np.minimum.accumulate(fastest, out=fastest)

    def _all_left(self, group: Group, most: int) -> Iterator[_Left]:
        """Of ``group``, up to so many devices; less comes before more."""
        for members in product(*(range(len(kind) + 1) for kind in group.kinds)):
            devices = _num_devices(group, members)
            for fewer in range(devices + 1) if self._counts_devices(group) else (devices,):
                if fewer <= most:
                    yield _Left(members, fewer)

    def _less(self, group: Group, left: _Left) -> Iterator[_Left]:
        """One member less of each kind, and one device less, where any may stay unused."""
        if self.every_device:
            return
        for kind, count in enumerate(left.members):
            if count:
                members = _without(left.members, kind, 1)
                yield _Left(members, min(left.devices, _num_devices(group, members)))
        if self._counts_devices(group) and left.devices:
            yield left._replace(devices=left.devices - 1)

    def _options(self, group: Group, left: _Left) -> Iterator[_Option]:
        for kind, most in enumerate(left.members):
            for replicas in range(1, min(most, self.max_replicas) + 1):
                members = _without(left.members, kind, replicas)
                all_devices, whole = _num_devices(group, members), group.kinds[kind][0].num_devices
                for devices in range(whole, 0, -1) if self._counts_devices(group) else (whole,):
                    rest = min(left.devices - replicas * devices, all_devices)
                    if rest >= 0:
                        yield _Option(kind, replicas, devices, _Left(members, rest))

    def _counts_devices(self, group: Group) -> bool:
        """Whether earlier stages need less memory if a member does without some of its devices."""
        return self.minds_later and group.level > 0 and not self.every_device

    def _may_take(self, group: Group, left: _Left) -> bool:
        """Whether a pipeline may be on so much of a group."""
        return not self.every_device or left.devices == group.num_devices

    def _may_remain(self, left: _Left) -> bool:
        """Whether so much may be left when everything is done."""
        return not self.every_device or left.devices == 0

    def _remembering(self, group: Group, cost: _Cost) -> _Cost:
        """The same costs; those of stages that do not begin a group worked out only once, if they are few."""
        everywhere = self._everywhere(0)
        num_options = sum(min(len(kind), self.max_replicas) for kind in group.kinds)
        if self.minds_later or num_options * len(everywhere) ** 2 > _MOST_REMEMBERED:
            return cost
        known: dict[object, Matrix] = {}

        def remembered(option: _Option, begins: bool, rows: Indices, columns: Indices) -> Matrix:
            if begins:
                return cost(option, begins, rows, columns)
            key = (option.kind, option.replicas)
            if key not in known:
                known[key] = cost(option, begins, everywhere, everywhere)
            return between(known[key], rows, columns)

        return remembered


def _without(members: Counts, kind: int, count: int) -> Counts:
    return (*members[:kind], members[kind] - count, *members[kind + 1 :])


def _in_time(task: _Task, finish: dict[_Left, Vector], limit: float) -> Useful:
    """Of the useful boundaries, those from which the stages that are left can keep within the limit."""
    from_each: dict[int, Vector] = {}
    for left, seconds in finish.items():
        from_each[left.devices] = np.minimum(from_each.get(left.devices, np.inf), seconds)

    @functools.cache
    def useful(num_devices: int) -> Indices:
        known = task.useful(num_devices)
        return known[from_each[num_devices][known] <= limit]

    return useful


def _num_devices(group: Group, members: Counts) -> int:
    return sum(count * kind[0].num_devices for count, kind in zip(members, group.kinds, strict=True))


def _later(after: int, option: _Option) -> int:
    """Devices that follow each replica of the option's stage, rounded up."""
    return math.ceil((after + option.rest.devices) / option.replicas)


def _least(
    join: np.ufunc,
    stages: Callable[[Indices, Indices], Matrix],
    rows: Indices,
    columns: Indices,
    rest: Vector,
) -> Vector:
    """For each row, the least ``join`` of a stage from there and the ``rest`` after its last column.

    A few rows at a time, to stay in the cache. No stage ends before it begins.
    """
    least = np.full(len(rows), np.inf)
    first = np.searchsorted(columns, rows, side="right")
    for row in range(0, len(rows), _ROWS):
        block, behind = slice(row, row + _ROWS), first[row]
        costs = stages(rows[block], columns[behind:])
        least[block] = join(costs, rest[behind:]).min(axis=1, initial=np.inf)
    return least


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
