"""What a stage may take of a group of devices, and what that leaves for the stages after it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from pipec.planner.groups import Group

Counts = tuple[int, ...]
"""How many members of each kind."""


class Left(NamedTuple):
    """What stages may use: so many ``members`` of each kind, and at most so many of their ``devices``."""

    members: Counts
    devices: int


class Option(NamedTuple):
    """A stage on up to ``devices`` of each of ``replicas`` members; the ``rest`` is for later stages."""

    kind: int
    replicas: int
    devices: int
    rest: Left

    def following(self, after: int) -> int:
        """The number of devices that follow each replica of the stage, rounded up.

        ``after`` is the number that follow the whole pipeline.
        """
        return math.ceil((after + self.rest.devices) / self.replicas)


@dataclass(frozen=True)
class Options:
    """Stages on at most ``max_replicas`` members of a group.

    ``minds_later``: whether a stage fits in memory depends on the devices that follow it.
    ``every_device``: no device may stay unused.
    """

    max_replicas: int
    minds_later: bool
    every_device: bool

    def of(self, group: Group, left: Left) -> Iterator[Option]:
        """Every stage that may come first on what is left of the group."""
        for kind, most in enumerate(left.members):
            for replicas in range(1, min(most, self.max_replicas) + 1):
                members = _without(left.members, kind, replicas)
                all_devices, whole = num_devices(group, members), group.kinds[kind][0].num_devices
                for devices in range(whole, 0, -1) if self._counts_devices(group) else (whole,):
                    rest = min(left.devices - replicas * devices, all_devices)
                    if rest >= 0:
                        yield Option(kind, replicas, devices, Left(members, rest))

    def parts(self, group: Group, most: int) -> Iterator[Left]:
        """Every part of a group with up to ``most`` devices; less comes before more."""
        for members in product(*(range(len(kind) + 1) for kind in group.kinds)):
            devices = num_devices(group, members)
            for fewer in range(devices + 1) if self._counts_devices(group) else (devices,):
                if fewer <= most:
                    yield Left(members, fewer)

    def less(self, group: Group, left: Left) -> Iterator[Left]:
        """What remains if one member, or one device, stays unused."""
        if self.every_device:
            return
        for kind, count in enumerate(left.members):
            if count:
                members = _without(left.members, kind, 1)
                yield Left(members, min(left.devices, num_devices(group, members)))
        if self._counts_devices(group) and left.devices:
            yield left._replace(devices=left.devices - 1)

    def may_take(self, group: Group, left: Left) -> bool:
        """Whether a pipeline may be on so much of a group."""
        return not self.every_device or left.devices == group.num_devices

    def may_remain(self, left: Left) -> bool:
        """Whether so much may be left when everything is done."""
        return not self.every_device or left.devices == 0

    def _counts_devices(self, group: Group) -> bool:
        """Whether earlier stages need less memory if a member does without some of its devices."""
        return self.minds_later and group.level > 0 and not self.every_device


def num_devices(group: Group, members: Counts) -> int:
    """How many devices so many members of each kind have."""
    return sum(count * kind[0].num_devices for count, kind in zip(members, group.kinds, strict=True))


def _without(members: Counts, kind: int, count: int) -> Counts:
    return (*members[:kind], members[kind] - count, *members[kind + 1 :])
