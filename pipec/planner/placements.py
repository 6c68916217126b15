"""Where stages may run: devices taken from nested groups, one stage after the other.

Members of a group are sorted into classes of equal ones. A stage takes some members of one class, and a
replica runs on each. If they are groups themselves, they hold one pipeline, the same in each, and the stages
that follow are inside them until they are full. So the next stage depends on what is left of the groups that
earlier stages have opened::

    2 hosts of 2 devices         the first stage takes one device of one host:
                                   left: 1 host, and 1 device of the open one
                                 or one device of each host, as replicas:
                                   left: 1 device of each open host
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

from pipec.hardware.topology import Device, Topology


@dataclass(frozen=True, slots=True, eq=False)
class DeviceGroup:
    """Devices, by their indices in the topology, or groups, joined by the links of level ``level``.

    Members of a class are interchangeable: they consist of equal devices, listed in the same order.
    """

    level: int
    classes: tuple[tuple["DeviceGroup | int", ...], ...]

    def num_devices(self, left: Sequence[int]) -> int:
        """The number of devices of so many members of each class."""
        return sum(count * _size(kind[0]) for kind, count in zip(self.classes, left, strict=True))


class Placement(NamedTuple):
    """Where a stage may run: on ``members[k]`` members of a group of level k, for each level.

    The values that it reads cross links of ``level``, one for each of ``links`` microbatches.
    ``later_devices``: those of later stages for each replica, rounded up.
    """

    device: Device
    members: tuple[int, ...]
    level: int
    links: int
    later_devices: int

    @property
    def replicas(self) -> int:
        return math.prod(self.members)

    @property
    def rate(self) -> float:
        """The seconds of work that the replicas together do in a second."""
        return self.device.speed * self.replicas


class OpenGroup(NamedTuple):
    """A group and its replicas, of which so many members of each class are ``left``.

    ``members``: how many members of the groups around it hold the same, from the outside in. ``after``: the
    devices that follow the group, for each replica of it.
    """

    group: DeviceGroup
    left: tuple[int, ...]
    members: tuple[int, ...]
    after: int


Left = tuple[OpenGroup, ...]
"""The open groups, from the outside in; empty if every device has a stage."""


class Option(NamedTuple):
    """A next stage; the class and the number of members that it takes, from the outside in; what is left."""

    placement: Placement
    taken: tuple[tuple[int, int], ...]
    left: Left


@dataclass(frozen=True)
class Placements:
    """The placements of stages on all devices.

    A stage has up to ``replicas`` at each level; or stage k has ``replicas[k]``, on devices of one level.
    """

    topology: Topology
    replicas: int | Sequence[int]

    def start(self) -> Left:
        return (_opened(_outermost(self.topology), (), 0),)

    def options(self, left: Left) -> Iterator[Option]:
        """Every way to place the next stage."""
        if isinstance(self.replicas, int):
            counts: Sequence[int] = range(1, self.replicas + 1)
        else:
            taken = len(self.topology.devices) - devices_left(left)
            stage = list(accumulate(self.replicas, initial=0)).index(taken)
            counts = self.replicas[stage : stage + 1]
        return self._inside(left[:-1], left[-1], left[-1].group.level, (), counts)

    def only_options(self) -> list[Option]:
        """The options of all stages if each is the only one; none if there is a choice."""
        options, left = list[Option](), self.start()
        while left:
            option, *others = islice(self.options(left), 2)
            if others:
                return []
            options.append(option)
            left = option.left
        return options

    def _inside(
        self,
        outer: Left,
        inner: OpenGroup,
        level: int,
        taken: tuple[tuple[int, int], ...],
        counts: Sequence[int],
    ) -> Iterator[Option]:
        group = inner.group
        for index, (kind, most) in enumerate(zip(group.classes, inner.left, strict=True)):
            for count in (number for number in counts if number <= most):
                rest = (*inner.left[:index], most - count, *inner.left[index + 1 :])
                remaining = (*outer, inner._replace(left=rest))
                members, now_taken = (*inner.members, count), (*taken, (index, count))
                after = math.ceil((inner.after + group.num_devices(rest)) / count)
                if isinstance(kind[0], DeviceGroup):
                    opened = _opened(kind[0], members, after)
                    yield from self._inside(remaining, opened, level, now_taken, counts)
                else:
                    links = math.prod(members[: len(self.topology.levels) - level])
                    device = self.topology.devices[kind[0]]
                    placement = Placement(device, members[::-1], level, links, after)
                    yield Option(placement, now_taken, _without_full_groups(remaining))

    def devices(self, options: Sequence[Option]) -> Iterator[tuple[int, ...]]:
        """The devices of each stage. Of a class, those that are listed first are used first."""
        left, alike = self.start(), [[_outermost(self.topology)]]
        for option in options:
            for index, count in option.taken:
                groups, depth = alike[-1], len(alike) - 1
                whole = len(groups[0].classes[index])
                used = whole - left[depth].left[index] if depth < len(left) else 0
                chosen = [each for group in groups for each in group.classes[index][used : used + count]]
                alike.append([each for each in chosen if isinstance(each, DeviceGroup)])
            yield tuple(sorted(each for each in chosen if isinstance(each, int)))
            left = option.left
            del alike[max(len(left), 1) :]


def devices_left(left: Left) -> int:
    """The number of devices that have no stage yet."""
    return sum(math.prod(each.members) * each.group.num_devices(each.left) for each in left)


def _outermost(topology: Topology) -> DeviceGroup:
    members: list[tuple[tuple[object, ...], DeviceGroup | int]] = [
        ((device.memory_bytes, device.speed), index) for index, device in enumerate(topology.devices)
    ]
    for index, level in enumerate(topology.levels):
        groups = (members[first : first + level.size] for first in range(0, len(members), level.size))
        members = [_grouped(index, group) for group in groups]
    ((_, outermost),) = members
    assert isinstance(outermost, DeviceGroup)
    return outermost


def _grouped(
    level: int, members: Sequence[tuple[tuple[object, ...], DeviceGroup | int]]
) -> tuple[tuple[object, ...], DeviceGroup]:
    """A group, with the signature that equal groups share."""
    classes: dict[tuple[object, ...], list[DeviceGroup | int]] = {}
    for signature, member in sorted(members, key=lambda each: each[0]):
        classes.setdefault(signature, []).append(member)
    signature = tuple((len(kind), each) for each, kind in classes.items())
    return signature, DeviceGroup(level, tuple(map(tuple, classes.values())))


def _opened(group: DeviceGroup, members: tuple[int, ...], after: int) -> OpenGroup:
    return OpenGroup(group, tuple(map(len, group.classes)), members, after)


def _without_full_groups(left: Left) -> Left:
    while left and not any(left[-1].left):
        left = left[:-1]
    return left


def _size(member: DeviceGroup | int) -> int:
    return member.num_devices([*map(len, member.classes)]) if isinstance(member, DeviceGroup) else 1
