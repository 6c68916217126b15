"""The best pipeline on a hierarchy of devices: exact dynamic programming over downsets and devices.

The best pipeline from downset d to downset e, on given members of a group, has a first stage that ends at
some downset x. So its seconds are the least, over x and over the members that the first stage takes, of

    max(seconds of the stage from d to x, seconds of the best pipeline from x to e on the members left)

A group with all its members at work is one device of the level above (PipeDream, Narayanan et al., SOSP 2019,
section 3.1). A second pass with sums for maxima finds the plan that communicates least among the fast ones.

A stage needs the more memory, the more devices follow it. For this reason stages are chosen from the last to
the first, and where memory is limited, a group may be asked for a pipeline on only some of its devices.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

import numpy as np

from pipec.planner.downsets import Indices, Vector
from pipec.planner.groups import Group, Leaf, Member
from pipec.planner.stage_costs import Matrix, StageCosts, between

Tensor = Matrix
"""Of three dimensions."""

_ROWS = 64

_MOST_REMEMBERED = 1 << 26
"""As many costs as this are kept. Otherwise they are worked out again for every few downsets."""

Counts = tuple[int, ...]
"""How many members of each kind."""

Useful = Callable[[int], Indices]
"""For a number of devices of the outermost group, the downsets at which a plan may have so many left."""


class ChosenStage(NamedTuple):
    """A stage from downset ``first`` to downset ``last``, with a replica on each of ``devices``.

    Seconds are per microbatch and include the links and the all-reduce of every level. ``after`` is the
    number of later devices for each replica, rounded up.
    """

    first: int
    last: int
    devices: tuple[int, ...]
    seconds: float
    communication_seconds: float
    after: int


class _Left(NamedTuple):
    """What stages may use: so many ``members`` of each kind, and at most so many of their ``devices``."""

    members: Counts
    devices: int


class _Option(NamedTuple):
    """A stage on up to ``devices`` of each of ``replicas`` members; the ``rest`` is for later stages."""

    kind: int
    replicas: int
    devices: int
    rest: _Left


class _Task(NamedTuple):
    """To find a pipeline from downset ``first`` to downset ``last`` on up to ``devices`` of ``group``.

    ``after``: the number of later devices for each replica of the pipeline, rounded up. ``limit``: how many
    seconds it may take if a tolerance allows more than the fewest. ``begins``: a stage at ``first`` is the
    first of its group.
    """

    group: Group
    devices: int
    first: int
    last: int
    after: int
    useful: Useful
    limit: float = math.inf
    begins: bool = True


class _FirstStage(NamedTuple):
    cost: float
    option: _Option
    last: int


_Cost = Callable[[_Option, bool, Indices, Indices], Matrix]
"""What stages with an option cost, whether or not the first of their group, between rows and columns."""


@dataclass(frozen=True)
class Hierarchy:
    """Stages with ``costs`` on groups of devices, each on at most ``max_replicas`` members of a group.

    ``minds_later``: whether a stage fits in memory depends on the devices that follow it.
    ``every_device``: no device may stay unused. ``tolerance``: the share of the least seconds that a plan may
    take longer in order to communicate less.
    """

    costs: StageCosts
    max_replicas: int
    minds_later: bool
    every_device: bool
    tolerance: float
    _known: dict[object, Tensor] = field(default_factory=dict, repr=False)

    def pipeline(self, group: Group, useful: Useful) -> tuple[float, tuple[ChosenStage, ...]]:
        """The least seconds of a pipeline for everything, and the stages of the best one.

        Of the pipelines within the tolerance, the best are those on the fewest members of the group, and of
        these the one that communicates least. If none fits in memory, the seconds are infinite and there are
        no stages. ``useful`` has to name every downset that a pipeline within the tolerance may use.
        """
        last = len(self.costs.downsets) - 1
        return self._solve(_Task(group, group.num_devices, 0, last, 0, useful))

    def _solve(self, task: _Task) -> tuple[float, tuple[ChosenStage, ...]]:
        seconds = self._remembering(task.group, functools.partial(self._stage, task.group, task.after))
        finish = self._finish(task, seconds, np.maximum)
        fastest = {
            left: self._first_stage(task, left, finish, seconds, np.maximum).cost
            for left in finish
            if task.first in task.useful(left.devices) and self._may_take(task.group, left)
        }
        least = min(fastest.values())
        if least == np.inf:
            return least, ()
        limit = max(least, min(least * (1 + self.tolerance), task.limit))
        enough = [left for left, seconds_of_left in fastest.items() if seconds_of_left <= limit]
        fewest = min(enough, key=lambda left: (_num_devices(task.group, left.members), left.devices))

        def communication(option: _Option, begins: bool, rows: Indices, columns: Indices) -> Matrix:
            spent = self.costs.communication(task.group.level, option.replicas, begins, rows, columns)
            return np.where(seconds(option, begins, rows, columns) <= limit, spent, np.inf)

        in_time = task._replace(useful=_in_time(task, finish, limit))
        return least, self._follow(in_time, fewest, limit, self._remembering(task.group, communication))

    def _follow(self, task: _Task, left: _Left, limit: float, cost: _Cost) -> tuple[ChosenStage, ...]:
        """The stages with the least sum of ``cost`` on what is ``left``, from the first to the last."""
        finish = self._finish(task, cost, np.add)
        unused = [iter(kind) for kind in task.group.kinds]
        stages: list[ChosenStage] = []
        while task.first != task.last:
            while not task.begins and (less := self._as_good(task, left, finish)):
                left = less
            _, option, last = self._first_stage(task, left, finish, cost, np.add)
            members = [next(unused[option.kind]) for _ in range(option.replicas)]
            stages += self._placed(task._replace(limit=limit), option, last, members)
            task, left = task._replace(first=last, begins=False), option.rest
        return tuple(stages)

    def _finish(self, task: _Task, cost: _Cost, join: np.ufunc) -> dict[_Left, Vector]:
        """For all that may be left, the least cost from every downset to the task's last.

        For a chain of operators of 1, 2 and 4 seconds, on devices that are alike::

            downset (operators held)        0    1    2    3
            on up to one device             7    6    4    0
            on up to two                    4    4    4    0
        """
        best: dict[_Left, Vector] = {}
        for left in self._all_left(task.group, task.devices):
            rows = task.useful(left.devices)
            least = np.full(len(self.costs.downsets), np.inf)
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
        """The best first stage of the task, with the cost of all stages, on as much of ``left`` as needed."""
        best = _FirstStage(np.inf, _Option(0, 0, 0, left), task.last)
        for option in self._options(task.group, left):
            columns = task.useful(option.rest.devices)
            row = cost(option, task.begins, np.array([task.first]), columns)
            costs = join(row, finish[option.rest][columns])[0]
            if costs.min(initial=np.inf) < best.cost:
                best = _FirstStage(float(costs.min()), option, int(columns[costs.argmin()]))
        return best

    def _as_good(self, task: _Task, left: _Left, finish: dict[_Left, Vector]) -> _Left | None:
        """Less of the group, if it costs no more to finish the task with it.

        The downsets that are useful may depend on how much is left.
        """
        cost = finish[left][task.first]
        return next((less for less in self._less(task.group, left) if finish[less][task.first] == cost), None)

    def _placed(
        self, task: _Task, option: _Option, last: int, members: Sequence[Member]
    ) -> Iterator[ChosenStage]:
        """The stage itself, or the stages inside each of its replicas, with what this level adds to them.

        The stages take no longer than ``task.limit`` together with it.
        """
        span = (task.group.level, option.replicas, task.begins, np.array([task.first]), np.array([last]))
        limit = float(self.costs.busy_within(task.limit, *span)[0, 0])
        for stage in self._inside(members[0], task._replace(limit=limit), option, last):
            busy = np.array([[stage.seconds]])
            spent = stage.communication_seconds / option.replicas
            yield stage._replace(
                devices=_counterparts(stage.devices, members),
                seconds=float(self.costs.stage(busy, *span)[0, 0]),
                communication_seconds=spent + float(self.costs.communication(*span)[0, 0]),
            )

    def _inside(self, member: Member, task: _Task, option: _Option, last: int) -> tuple[ChosenStage, ...]:
        after = _later(task.after, option)
        if isinstance(member, Group):
            inside = _Task(member, option.devices, task.first, last, after, self._everywhere, task.limit)
            return self._solve(inside)[1]
        busy = self.costs.on_device(member.device, after, np.array([task.first]), np.array([last]))
        return (ChosenStage(task.first, last, (member.index,), float(busy[0, 0]), 0.0, after),)

    def _everywhere(self, num_devices: int) -> Indices:
        return np.arange(len(self.costs.downsets))

    def _stage(
        self, group: Group, after: int, option: _Option, begins: bool, rows: Indices, columns: Indices
    ) -> Matrix:
        busy = self._busy(group.kinds[option.kind][0], option.devices, _later(after, option), rows, columns)
        return self.costs.stage(busy, group.level, option.replicas, begins, rows, columns)

    def _busy(self, member: Member, devices: int, after: int, rows: Indices, columns: Indices) -> Matrix:
        """Seconds of the best pipeline on so many devices of one ``member``."""
        if isinstance(member, Leaf):
            return self.costs.on_device(member.device, after, rows, columns)
        key = (member.signature, after if self.minds_later else None)
        if key not in self._known:
            self._known[key] = self._all_pipelines(member, after)
        return between(self._known[key][devices], rows, columns)

    def _all_pipelines(self, group: Group, after: int) -> Tensor:
        """At [n, d, e], the seconds of the best pipeline from d to e on up to n devices of ``group``."""
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
        """Every part of a group with up to ``most`` devices; less comes before more."""
        for members in product(*(range(len(kind) + 1) for kind in group.kinds)):
            devices = _num_devices(group, members)
            for fewer in range(devices + 1) if self._counts_devices(group) else (devices,):
                if fewer <= most:
                    yield _Left(members, fewer)

    def _less(self, group: Group, left: _Left) -> Iterator[_Left]:
        """What remains if one member, or one device, stays unused."""
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
        """The same costs. Those of stages that do not begin a group are worked out once, if they are few."""
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
    """The useful downsets from which the stages that are left can keep within the limit."""
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
    """The number of devices that follow each replica of the option's stage, rounded up."""
    return math.ceil((after + option.rest.devices) / option.replicas)


def _least(
    join: np.ufunc,
    stages: Callable[[Indices, Indices], Matrix],
    rows: Indices,
    columns: Indices,
    rest: Vector,
) -> Vector:
    """For each row, the least ``join`` of a stage from there and the ``rest`` after its last column.

    It takes a few rows at a time, to stay in the cache. No stage ends before it begins.
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
    """The devices that correspond, in all ``members``, to ``devices`` of the first member."""
    position = {device: k for k, device in enumerate(members[0].device_indices)}
    return tuple(member.device_indices[position[device]] for member in members for device in devices)
