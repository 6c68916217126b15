"""Enumerates the devices that the first stage may use, and the remaining ones for the stages after it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from pipec.planner.device_groups import DeviceGroup

MemberCounts = tuple[int, ...]
"""The number of members of each class."""


class AvailableDevices(NamedTuple):
    """The ``members`` of each class that stages may use, and the most ``devices`` of them."""

    members: MemberCounts
    devices: int


class StageOption(NamedTuple):
    """A stage on up to ``devices`` of each of ``replicas`` members; the ``remaining`` ones are left."""

    member_class: int
    replicas: int
    devices: int
    remaining: AvailableDevices

    def later_devices(self, after: int) -> int:
        """The number of devices that follow each replica of the stage, rounded up.

        ``after`` is the number that follow the whole pipeline.
        """
        return math.ceil((after + self.remaining.devices) / self.replicas)


@dataclass(frozen=True)
class StageOptions:
    """Stages on at most ``max_replicas`` members of a group.

    ``memory_depends_on_later_stages``: whether a stage fits in memory depends on the devices that follow it.
    ``use_all_devices``: no device may stay unused.
    """

    max_replicas: int
    memory_depends_on_later_stages: bool
    use_all_devices: bool

    def first_stages(self, group: DeviceGroup, left: AvailableDevices) -> Iterator[StageOption]:
        """Every stage that may come first on the remaining devices of the group."""
        for member_class, most in enumerate(left.members):
            for replicas in range(1, min(most, self.max_replicas) + 1):
                members = _without(left.members, member_class, replicas)
                all_devices, whole = (
                    num_devices(group, members),
                    group.member_classes[member_class][0].num_devices,
                )
                for devices in range(whole, 0, -1) if self._counts_devices(group) else (whole,):
                    rest = min(left.devices - replicas * devices, all_devices)
                    if rest >= 0:
                        yield StageOption(member_class, replicas, devices, AvailableDevices(members, rest))

    def subsets(self, group: DeviceGroup, most: int) -> Iterator[AvailableDevices]:
        """Every subset of a group with up to ``most`` devices, smaller ones first."""
        for members in product(*(range(len(member_class) + 1) for member_class in group.member_classes)):
            devices = num_devices(group, members)
            for fewer in range(devices + 1) if self._counts_devices(group) else (devices,):
                if fewer <= most:
                    yield AvailableDevices(members, fewer)

    def one_fewer(self, group: DeviceGroup, left: AvailableDevices) -> Iterator[AvailableDevices]:
        """The available devices if one more member, or one more device, stays unused."""
        if self.use_all_devices:
            return
        for member_class, count in enumerate(left.members):
            if count:
                members = _without(left.members, member_class, 1)
                yield AvailableDevices(members, min(left.devices, num_devices(group, members)))
        if self._counts_devices(group) and left.devices:
            yield left._replace(devices=left.devices - 1)

    def may_start_with(self, group: DeviceGroup, left: AvailableDevices) -> bool:
        """Whether a pipeline may use just these devices of a group."""
        return not self.use_all_devices or left.devices == group.num_devices

    def may_leave_unused(self, left: AvailableDevices) -> bool:
        """Whether these devices may stay unused when all stages are placed."""
        return not self.use_all_devices or left.devices == 0

    def _counts_devices(self, group: DeviceGroup) -> bool:
        """Whether earlier stages need less memory if a member does without some of its devices."""
        return self.memory_depends_on_later_stages and group.level > 0 and not self.use_all_devices


def num_devices(group: DeviceGroup, members: MemberCounts) -> int:
    """The number of devices of these members."""
    return sum(
        count * member_class[0].num_devices
        for count, member_class in zip(members, group.member_classes, strict=True)
    )


def _without(members: MemberCounts, member_class: int, count: int) -> MemberCounts:
    return (*members[:member_class], members[member_class] - count, *members[member_class + 1 :])
