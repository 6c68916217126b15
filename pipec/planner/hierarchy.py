"""The best pipeline on a hierarchy of devices: exact dynamic programming over downsets and devices.

The best pipeline from downset d to downset e, on given members of a group, has a first stage that ends at
some downset x. So its seconds are the least, over x and over the members that the first stage takes, of

    max(seconds of the stage from d to x, seconds of the best pipeline from x to e on the members left)

A group with all its members at work is one device of the level above (PipeDream, Narayanan et al., SOSP 2019,
section 3.1). A second pass with sums for maxima finds the plan that communicates least among the fast ones.

The more devices follow a stage, the more memory it needs. Therefore stages are chosen from the last to the
first, and if memory is limited, a group may be given a pipeline on some of its devices alone.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pipec.planner.device_groups import DeviceGroup, GroupMember, SingleDevice
from pipec.planner.downsets import Indices, Vector
from pipec.planner.stage_cost_matrices import Matrix, StageCostMatrices, submatrix
from pipec.planner.stage_options import AvailableDevices, StageOption, StageOptions, num_devices

Tensor = Matrix
"""Of three dimensions."""

_ROWS = 64

_CLOSE = 1e-3
"""How close bisection comes to the fastest plan among those that communicate equally little."""

_MAX_CACHED = 1 << 26
"""The most costs that are cached. Otherwise they are computed again for every few downsets."""

Useful = Callable[[int], Indices]
"""The downsets at which a plan may have a given number of devices of the outermost group left."""


class StageInterval(NamedTuple):
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


class _Task(NamedTuple):
    """The problem of a pipeline from downset ``first`` to downset ``last`` on up to ``devices`` of ``group``.

    ``after``: the number of later devices for each replica of the pipeline, rounded up. ``limit``: the
    seconds that it may take if a tolerance allows more than the fewest. ``begins``: a stage at ``first`` is
    the first of its group.
    """

    group: DeviceGroup
    devices: int
    first: int
    last: int
    after: int
    useful: Useful
    limit: float = np.inf
    begins: bool = True


class _FirstStage(NamedTuple):
    cost: float
    option: StageOption
    last: int


_Cost = Callable[[StageOption, bool, Indices, Indices], Matrix]
"""The costs of stages: takes an option, whether they begin their group, and rows and columns of downsets."""


class _Sums(NamedTuple):
    """The ``cost`` of stages for a task, and the least sum of it from every downset to the task's last."""

    task: _Task
    cost: _Cost
    finish: dict[AvailableDevices, Vector]


@dataclass(frozen=True)
class HierarchicalPartitioner:
    """Partitions operators with these ``costs`` over groups of devices, as the ``options`` allow.

    ``tolerance``: the share of the least seconds by which a plan may be slower if it communicates less.
    """

    costs: StageCostMatrices
    options: StageOptions
    tolerance: float
    _known: dict[object, Tensor] = field(default_factory=dict, repr=False)

    def best_pipeline(self, group: DeviceGroup, useful: Useful) -> tuple[float, tuple[StageInterval, ...]]:
        """The least seconds of a pipeline of all operators, and the stages of the best one.

        The best pipeline within the tolerance uses the fewest members of the group, then communicates least,
        then is the fastest, nearly. If none fits in memory, the seconds are infinite and there are no stages.
        ``useful`` must return every downset that a pipeline within the tolerance may use.
        """
        last = len(self.costs.downsets) - 1
        return self._solve(_Task(group, group.num_devices, 0, last, 0, useful))

    def _solve(self, task: _Task) -> tuple[float, tuple[StageInterval, ...]]:
        seconds = self._cached(task.group, functools.partial(self._stage, task.group, task.after))
        finish = self._finish(task, seconds, np.maximum)
        fastest = {
            left: self._first_stage(task, left, finish, seconds, np.maximum).cost
            for left in finish
            if task.first in task.useful(left.devices) and self.options.may_start_with(task.group, left)
        }
        least = min(fastest.values())
        if least == np.inf:
            return least, ()
        limit = max(least, min(least * (1 + self.tolerance), task.limit))
        enough = [left for left, seconds_of_left in fastest.items() if seconds_of_left <= limit]
        fewest = min(enough, key=lambda left: (num_devices(task.group, left.members), left.devices))
        within = functools.partial(self._within, task, seconds, finish)
        return least, self._follow(self._tightest(within, fewest, fastest[fewest], limit), fewest)

    def _within(
        self, task: _Task, seconds: _Cost, finish: dict[AvailableDevices, Vector], limit: float
    ) -> _Sums:
        """The least communication of pipelines with all stages within ``limit`` seconds."""

        def communication(option: StageOption, begins: bool, rows: Indices, columns: Indices) -> Matrix:
            spent = self.costs.communication_seconds(task.group.level, option.replicas, begins, rows, columns)
            return np.where(seconds(option, begins, rows, columns) <= limit, spent, np.inf)

        in_time = task._replace(useful=_in_time(task, finish, limit), limit=limit)
        cost = self._cached(task.group, communication)
        return _Sums(in_time, cost, self._finish(in_time, cost, np.add))

    def _tightest(
        self, within: Callable[[float], _Sums], left: AvailableDevices, low: float, high: float
    ) -> _Sums:
        """The sums for the least limit, nearly, that needs no more communication than ``high``."""
        best, limit = within(high), low
        spent = self._spent(best, left)
        while low < high:
            sums = within(limit)
            if self._spent(sums, left) == spent:
                best, high = sums, limit
            else:
                low = limit
            if high - low <= _CLOSE * high:
                break
            limit = (low + high) / 2
        return best

    def _spent(self, sums: _Sums, left: AvailableDevices) -> float:
        return self._first_stage(sums.task, left, sums.finish, sums.cost, np.add).cost

    def _follow(self, sums: _Sums, left: AvailableDevices) -> tuple[StageInterval, ...]:
        """The stages with the least sum of costs on the devices that are ``left``, from first to last."""
        task, cost, finish = sums
        unused = [iter(kind) for kind in task.group.member_classes]
        stages: list[StageInterval] = []
        while task.first != task.last:
            while not task.begins and (less := self._as_good(task, left, finish)):
                left = less
            _, option, last = self._first_stage(task, left, finish, cost, np.add)
            members = [next(unused[option.member_class]) for _ in range(option.replicas)]
            stages += self._placed(task, option, last, members)
            task, left = task._replace(first=last, begins=False), option.remaining
        return tuple(stages)

    def _finish(self, task: _Task, cost: _Cost, join: np.ufunc) -> dict[AvailableDevices, Vector]:
        """For all devices that may be left, the least cost from every downset to the task's last.

        For a chain of operators of 1, 2 and 4 seconds, on equal devices::

            downset (operators held)        0    1    2    3
            on up to one device             7    6    4    0
            on up to two                    4    4    4    0
        """
        best: dict[AvailableDevices, Vector] = {}
        for left in self.options.subsets(task.group, task.devices):
            rows = task.useful(left.devices)
            least = np.full(len(self.costs.downsets), np.inf)
            least[task.last] = 0.0 if self.options.may_leave_unused(left) else np.inf
            for less in self.options.one_fewer(task.group, left):
                np.minimum(least, best[less], out=least)
            for option in self.options.first_stages(task.group, left):
                columns = task.useful(option.remaining.devices)
                stages = functools.partial(cost, option, False)
                found = _least(join, stages, rows, columns, best[option.remaining][columns])
                least[rows] = np.minimum(least[rows], found)
            best[left] = least
        return best

    def _first_stage(
        self,
        task: _Task,
        left: AvailableDevices,
        finish: dict[AvailableDevices, Vector],
        cost: _Cost,
        join: np.ufunc,
    ) -> _FirstStage:
        """The best first stage of the task, with the cost of all stages, on devices that are ``left``."""
        best = _FirstStage(np.inf, StageOption(0, 0, 0, left), task.last)
        for option in self.options.first_stages(task.group, left):
            columns = task.useful(option.remaining.devices)
            row = cost(option, task.begins, np.array([task.first]), columns)
            costs = join(row, finish[option.remaining][columns])[0]
            if costs.min(initial=np.inf) < best.cost:
                best = _FirstStage(float(costs.min()), option, int(columns[costs.argmin()]))
        return best

    def _as_good(
        self, task: _Task, left: AvailableDevices, finish: dict[AvailableDevices, Vector]
    ) -> AvailableDevices | None:
        """Fewer members of the group, if the task then costs no more; else None.

        The useful downsets may depend on the devices that are left.
        """
        cost = finish[left][task.first]
        return next(
            (less for less in self.options.one_fewer(task.group, left) if finish[less][task.first] == cost),
            None,
        )

    def _placed(
        self, task: _Task, option: StageOption, last: int, members: Sequence[GroupMember]
    ) -> Iterator[StageInterval]:
        """The stage itself, or the stages inside each of its replicas, with the costs that this level adds.

        With these costs the stages take no longer than ``task.limit``.
        """
        span = (task.group.level, option.replicas, task.begins, np.array([task.first]), np.array([last]))
        limit = float(self.costs.busy_limit(task.limit, *span)[0, 0])
        for stage in self._inside(members[0], task._replace(limit=limit), option, last):
            busy = np.array([[stage.seconds]])
            spent = stage.communication_seconds / option.replicas
            yield stage._replace(
                devices=_counterparts(stage.devices, members),
                seconds=float(self.costs.stage_seconds(busy, *span)[0, 0]),
                communication_seconds=spent + float(self.costs.communication_seconds(*span)[0, 0]),
            )

    def _inside(
        self, member: GroupMember, task: _Task, option: StageOption, last: int
    ) -> tuple[StageInterval, ...]:
        after = option.later_devices(task.after)
        if isinstance(member, DeviceGroup):
            inside = _Task(member, option.devices, task.first, last, after, self._everywhere, task.limit)
            return self._solve(inside)[1]
        busy = self.costs.device_seconds(member.device, after, np.array([task.first]), np.array([last]))
        return (StageInterval(task.first, last, (member.index,), float(busy[0, 0]), 0.0, after),)

    def _everywhere(self, num_devices: int) -> Indices:
        return np.arange(len(self.costs.downsets))

    def _stage(
        self,
        group: DeviceGroup,
        after: int,
        option: StageOption,
        begins: bool,
        rows: Indices,
        columns: Indices,
    ) -> Matrix:
        busy = self._busy(
            group.member_classes[option.member_class][0],
            option.devices,
            option.later_devices(after),
            rows,
            columns,
        )
        return self.costs.stage_seconds(busy, group.level, option.replicas, begins, rows, columns)

    def _busy(self, member: GroupMember, devices: int, after: int, rows: Indices, columns: Indices) -> Matrix:
        """Seconds of the best pipeline on ``devices`` devices of one ``member``."""
        if isinstance(member, SingleDevice):
            return self.costs.device_seconds(member.device, after, rows, columns)
        key = (member.signature, after if self.options.memory_depends_on_later_stages else None)
        if key not in self._known:
            self._known[key] = self._all_pipelines(member, after)
        return submatrix(self._known[key][devices], rows, columns)

    def _all_pipelines(self, group: DeviceGroup, after: int) -> Tensor:
        """At [n, d, e], the seconds of the best pipeline from d to e on up to n devices of ``group``."""
        everywhere = self._everywhere(0)
        finish: dict[AvailableDevices, Matrix] = {}
        fastest = np.full((group.num_devices + 1, len(everywhere), len(everywhere)), np.inf)
        for left in self.options.subsets(group, group.num_devices):
            least = np.where(
                np.eye(len(everywhere), dtype=bool) & self.options.may_leave_unused(left), 0.0, np.inf
            )
            for less in self.options.one_fewer(group, left):
                np.minimum(least, finish[less], out=least)
            for option in self.options.first_stages(group, left):
                for begins, found in ((False, least), (True, fastest[left.devices])):
                    if begins and not self.options.may_start_with(group, left):
                        continue
                    stages = self._stage(group, after, option, begins, everywhere, everywhere)
                    _minimise(found, stages, finish[option.remaining])
            finish[left] = least
        return np.minimum.accumulate(fastest, out=fastest)

    def _cached(self, group: DeviceGroup, cost: _Cost) -> _Cost:
        """The same costs, cached for stages that do not begin a group, if they are few."""
        everywhere = self._everywhere(0)
        num_options = sum(min(len(kind), self.options.max_replicas) for kind in group.member_classes)
        if self.options.memory_depends_on_later_stages or num_options * len(everywhere) ** 2 > _MAX_CACHED:
            return cost
        known: dict[object, Matrix] = {}

        def cached(option: StageOption, begins: bool, rows: Indices, columns: Indices) -> Matrix:
            if begins:
                return cost(option, begins, rows, columns)
            key = (option.member_class, option.replicas)
            if key not in known:
                known[key] = cost(option, begins, everywhere, everywhere)
            return submatrix(known[key], rows, columns)

        return cached


def _in_time(task: _Task, finish: dict[AvailableDevices, Vector], limit: float) -> Useful:
    """The useful downsets from which the remaining stages can be within the limit."""
    from_each: dict[int, Vector] = {}
    for left, seconds in finish.items():
        from_each[left.devices] = np.minimum(from_each.get(left.devices, np.inf), seconds)

    @functools.cache
    def useful(num_devices: int) -> Indices:
        known = task.useful(num_devices)
        return known[from_each[num_devices][known] <= limit]

    return useful


def _least(
    join: np.ufunc,
    stages: Callable[[Indices, Indices], Matrix],
    rows: Indices,
    columns: Indices,
    rest: Vector,
) -> Vector:
    """For each row, the least ``join`` of a stage from there and the ``rest`` after its last column.

    Works on blocks of rows that stay in the cache. No stage ends before it begins.
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


def _counterparts(devices: Sequence[int], members: Sequence[GroupMember]) -> tuple[int, ...]:
    """The devices that correspond, in all ``members``, to ``devices`` of the first member."""
    position = {device: k for k, device in enumerate(members[0].device_indices)}
    return tuple(member.device_indices[position[device]] for member in members for device in devices)
