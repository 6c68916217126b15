"""A topology for the planner: nested groups whose members are sorted into interchangeable classes."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipec.hardware.topology import Device, Topology


@dataclass(frozen=True, slots=True)
class SingleDevice:
    """A device, by its index in the topology."""

    index: int
    device: Device

    @property
    def num_devices(self) -> int:
        return 1

    @property
    def signature(self) -> tuple[object, ...]:
        return (self.device.memory_bytes, self.device.speed)

    @property
    def device_indices(self) -> tuple[int, ...]:
        return (self.index,)


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices or groups joined by the links of level ``level`` of the topology, sorted into interchangeable
    classes.

    Members of a kind are interchangeable: they consist of equal devices, listed in the same order.
    """

    level: int
    member_classes: tuple[tuple["SingleDevice | DeviceGroup", ...], ...]

    @property
    def num_devices(self) -> int:
        return sum(member.num_devices for kind in self.member_classes for member in kind)

    @property
    def signature(self) -> tuple[object, ...]:
        return tuple((len(kind), kind[0].signature) for kind in self.member_classes)

    @property
    def device_indices(self) -> tuple[int, ...]:
        """The indices of all devices, in an order in which groups of one signature correspond."""
        return tuple(
            index for kind in self.member_classes for member in kind for index in member.device_indices
        )


GroupMember = SingleDevice | DeviceGroup


def nested_groups(topology: Topology) -> DeviceGroup:
    """The outermost group, in which every other is nested."""
    members: list[GroupMember] = [
        SingleDevice(index, device) for index, device in enumerate(topology.devices)
    ]
    for index, level in enumerate(topology.levels):
        groups = range(0, len(members), level.size)
        members = [DeviceGroup(index, _kinds(members[first : first + level.size])) for first in groups]
    (outermost,) = members
    assert isinstance(outermost, DeviceGroup)
    return outermost


def _kinds(members: Sequence[GroupMember]) -> tuple[tuple[GroupMember, ...], ...]:
    by_signature: dict[tuple[object, ...], list[GroupMember]] = {}
    for member in members:
        by_signature.setdefault(member.signature, []).append(member)
    return tuple(tuple(by_signature[key]) for key in sorted(by_signature, key=repr))
