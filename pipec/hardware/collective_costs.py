"""How long collectives take: rings over the slowest link between their members, or rings within rings.

In a ring of r members every one passes an r-th of the bytes to the next, r - 1 times to sum or to gather, and
twice as often to do both (Patarasuk and Yuan: Bandwidth optimal all-reduce algorithms, 2009).

Where members are on several hosts, each host may sum within itself before its members sum with those of other
hosts, each a part of its own; to gather goes the other way round. All members of a host then use its link at
a time, and what it carries is what one ring of hosts passes on.

Over gloo these are what runs. NCCL chooses its rings and trees when it starts; what it chooses is not known
here, and the faster of these two is what it is at least as good as.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby
from operator import mul

from pipec.hardware.topology import Topology


def unshard_seconds(
    topology: Topology, devices: Sequence[int], num_bytes: float, num_hosts: int = 1
) -> float:
    """Until every device has the ``num_bytes`` of which each had a share, or its share of their sum.

    As many devices after one another are on each of ``num_hosts``, which one host stands for as well.
    """
    hosts = _split_by_host(devices, num_hosts)
    inside = max(_ring_seconds(topology, host, num_bytes) for host in hosts)
    return inside + max(_ring_seconds(topology, across, num_bytes) for across in zip(*hosts, strict=True))


def all_reduce_seconds(
    topology: Topology, devices: Sequence[int], num_bytes: float, num_hosts: int = 1
) -> float:
    """Until every device has the sum of what all of them have."""
    return 2 * unshard_seconds(topology, devices, num_bytes, num_hosts)


def fastest_num_hosts(topology: Topology, devices: Sequence[int], num_bytes: float) -> int:
    """On how many hosts the devices are to be seen for the fastest collective: 1 stands for one ring."""
    found = {1}
    for reach in accumulate((level.size for level in topology.levels), mul):
        sizes = {len(list(group)) for _, group in groupby(device // reach for device in devices)}
        if len(sizes) == 1:
            found.add(len(devices) // sizes.pop())
    return min(sorted(found), key=lambda count: unshard_seconds(topology, devices, num_bytes, count))


def _split_by_host(devices: Sequence[int], num_hosts: int) -> list[Sequence[int]]:
    size = len(devices) // num_hosts
    return [devices[first : first + size] for first in range(0, len(devices), size)]


def _ring_seconds(topology: Topology, devices: Sequence[int], num_bytes: float) -> float:
    if len(devices) < 2:
        return 0.0
    part = num_bytes / len(devices)
    return (len(devices) - 1) * max(way.seconds(part) for way in topology.links_among(devices))
