"""A topology: devices and the links between them, in levels of equal groups such as 2 hosts of 4 devices.

A topology file, in TOML or the same keys in JSON, lists devices in order and levels from the inside out::

    [[devices]]
    count = 8
    memory_bytes = 16e9      # default: no limit
    speed = 1.0              # operators take seconds / speed

    [[levels]]               # 4 devices share a host
    size = 4
    bytes_per_second = 12e9

    [[levels]]               # 2 hosts share a network
    size = 2
    bytes_per_second = 1.25e9
    latency_seconds = 1e-5
    message_bytes_per_second = 1e9  # of a message between two devices; default: bytes_per_second
"""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipec.errors import DAMAGED_DATA_ERRORS, PlanError
from pipec.hardware.devices import LinkModel
from pipec.ir.argument_checks import MOST_RANKS, check_arguments, integer_between


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """A device: operators take their seconds divided by ``speed``, and may hold ``memory_bytes``."""

    memory_bytes: float = math.inf
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Level:
    """Groups of ``size`` devices, or of ``size`` groups of the level below, joined by equal links.

    A message between two devices moves at most ``message_bytes_per_second``; collectives fill the link.
    """

    size: int
    bytes_per_second: float
    latency_seconds: float = 0.0
    message_bytes_per_second: float = math.inf

    @property
    def link(self) -> LinkModel:
        """The link as a collective of all members finds it."""
        return LinkModel(self.bytes_per_second, self.latency_seconds)

    @property
    def message_link(self) -> LinkModel:
        """The link as a message between two devices finds it."""
        return LinkModel(min(self.bytes_per_second, self.message_bytes_per_second), self.latency_seconds)


@dataclass(frozen=True, slots=True)
class Topology:
    """Devices, and ``levels`` of links from the inside out.

    The first level groups consecutive devices, the next groups consecutive groups, and so on. ``assumptions``
    are sentences about what was neither given nor measured; plans print them.

    Raises:
        PlanError: a figure is out of range, or the levels do not join exactly these devices.
    """

    devices: tuple[Device, ...]
    levels: tuple[Level, ...]
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for index, device in enumerate(self.devices):
            if not (device.memory_bytes > 0 and 0 < device.speed < math.inf):
                raise PlanError(
                    f"device {index} has {device.memory_bytes} bytes of memory and speed {device.speed}: "
                    f"expected both above 0"
                )
        for index, level in enumerate(self.levels):
            _check_level(index, level)
        num_reached = math.prod(level.size for level in self.levels)
        if not self.levels or num_reached != len(self.devices):
            sizes = " x ".join(str(level.size) for level in self.levels) or "no"
            lost = f": device {num_reached} cannot be reached" if num_reached < len(self.devices) else ""
            raise PlanError(
                f"the topology lists {len(self.devices)} devices, but {sizes} levels join {num_reached}"
                f"{lost}. Make the product of the sizes equal to the number of devices"
            )

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Topology":
        """The topology that a TOML or JSON file of this content has.

        >>> Topology.of({
        ...     "devices": [{"count": 8, "memory_bytes": 80e9}],
        ...     "levels": [{"size": 8, "bytes_per_second": 450e9, "latency_seconds": 1e-6}],
        ... })

        Raises ValueError for another format, LookupError and TypeError for missing and unknown fields.
        """
        if document.get("format", FORMAT) != FORMAT:
            raise ValueError(
                f"its format is {document['format']!r}, and this version of pipec reads {FORMAT!r}"
            )
        devices: list[Device] = []
        for entry in document["devices"]:
            figures = {key: float(value) for key, value in entry.items() if key != "count"}
            count = entry.get("count", 1)
            check_arguments({"count": integer_between(1, MOST_RANKS)}, locals())
            devices += [Device(**figures)] * count
        return cls(tuple(devices), tuple(Level(**entry) for entry in document["levels"]))

    def link_between(self, first: int, second: int) -> LinkModel:
        """The link of the innermost level that joins two devices, as a message finds it."""
        reach = 1
        for level in self.levels:
            reach *= level.size
            if first // reach == second // reach:
                break
        return level.message_link

    def levels_among(self, devices: Sequence[int]) -> list[Level]:
        """The levels with links between any two of several devices."""
        levels, groups = list[Level](), {*devices}
        for level in self.levels:
            members, groups = groups, {member // level.size for member in groups}
            if len(groups) < len(members):
                levels.append(level)
        return levels

    @property
    def slowest_level(self) -> Level:
        """The level with the lowest rate for messages, and the longest latency of any level."""
        return _slowest(self.levels)

    @property
    def slowest_link(self) -> LinkModel:
        """The link of the slowest level, as a message between two devices finds it."""
        return self.slowest_level.message_link

    def with_memory_limit(self, memory_bytes: float) -> "Topology":
        """The topology with at most ``memory_bytes`` on each device."""
        limited = (
            replace(device, memory_bytes=min(device.memory_bytes, memory_bytes)) for device in self.devices
        )
        return replace(self, devices=tuple(limited))

    def with_reserved_memory(self, num_bytes: Sequence[float]) -> "Topology":
        """The topology with ``num_bytes[d]`` less memory on device d. Each keeps at least one byte."""
        pairs = zip(self.devices, num_bytes, strict=True)
        remaining = (
            replace(device, memory_bytes=max(1.0, device.memory_bytes - reserved))
            for device, reserved in pairs
        )
        return replace(self, devices=tuple(remaining))

    def without_memory_limits(self) -> "Topology":
        """The topology with unlimited memory on each device."""
        return replace(self, devices=tuple(Device(speed=device.speed) for device in self.devices))

    def single_level(self) -> "Topology":
        """The same devices on one level: any two are joined by the slowest link."""
        return replace(self, levels=(replace(self.slowest_level, size=len(self.devices)),))

    def grouped(self, members: Sequence[Sequence[int]]) -> "Topology":
        """A topology with one device for each group of devices: the least memory and speed of its members.

        The k-th members of all groups exchange messages with each other. The slowest link between two of them
        joins all groups.
        """
        devices = [[self.devices[member] for member in group] for group in members]
        crossed = [level for each in zip(*members, strict=True) for level in self.levels_among(each)]
        level = replace(_slowest(crossed or self.levels[:1]), size=len(members))
        worst = (
            Device(min(each.memory_bytes for each in group), min(each.speed for each in group))
            for group in devices
        )
        return Topology(tuple(worst), (level,))

    def first_devices(self, num_devices: int) -> "Topology":
        """The topology of the first ``num_devices``.

        Levels stay from the inside out while the devices fill whole groups. Above them, one level joins all
        groups by the link between the first device and the last.
        """
        levels, num_groups = list[Level](), num_devices
        for level in self.levels:
            if num_groups % level.size:
                break
            levels.append(level)
            num_groups //= level.size
        if num_groups > 1 or not levels:
            (*_, outermost) = self.levels_among([0, num_devices - 1]) or self.levels[:1]
            levels.append(replace(outermost, size=num_groups))
        return replace(self, devices=self.devices[:num_devices], levels=tuple(levels))


def equal_devices(num_devices: int, link: LinkModel, memory_bytes: float = math.inf) -> Topology:
    """Equal devices, any two joined by the same link."""
    level = Level(num_devices, link.bytes_per_second, link.latency_seconds)
    return Topology((Device(memory_bytes),) * num_devices, (level,))


def _slowest(levels: Sequence[Level]) -> Level:
    """The level that carries messages at the lowest rate, with the longest latency of all."""
    slowest = min(levels, key=lambda level: level.message_link.bytes_per_second)
    return replace(slowest, latency_seconds=max(level.latency_seconds for level in levels))


FORMAT = "pipec topology 1"
"""What ``format`` in a file of a topology says; a file may leave it out."""


def read_topology(path: Path) -> Topology:
    """The topology in a file: TOML if its name ends in ``.toml``, else JSON. PlanError if it is malformed."""
    try:
        text = path.read_text(encoding="utf-8")
        return Topology.of(tomllib.loads(text) if path.suffix == ".toml" else json.loads(text))
    except DAMAGED_DATA_ERRORS as error:
        raise PlanError(
            f"{path} is not a topology: {error!r}. Expected devices (count, memory_bytes, speed) and levels "
            f"(size, bytes_per_second, latency_seconds, message_bytes_per_second), in TOML or JSON"
        ) from error


def _check_level(index: int, level: Level) -> None:
    if not isinstance(level.size, int) or level.size < 1:
        raise PlanError(f"level {index} joins {level.size!r} members: expected a whole number, 1 or more")
    rate = level.message_link.bytes_per_second
    if not (rate > 0 and 0 <= level.latency_seconds < math.inf):
        raise PlanError(
            f"level {index} carries {rate} bytes per second after "
            f"{level.latency_seconds} seconds, so devices cannot reach each other: expected a "
            f"bandwidth above 0 and a finite latency, 0 or more"
        )
