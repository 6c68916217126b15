"""How long collectives take: rings over the slowest link between their members.

In a ring of r members every one passes an r-th of the bytes to the next, r - 1 times to sum or to gather, and
twice as often to do both (Patarasuk and Yuan: Bandwidth optimal all-reduce algorithms, 2009).

The rings are flat, also between hosts, because that is what runs: gloo has one ring over all members of a
group. NCCL chooses among rings and trees when it starts; what it chooses is not known here, and a ring over
the slowest link is what it is at least as good as.
"""

from collections.abc import Sequence
from itertools import combinations

from pipec.hardware.topology import Topology


def gather_seconds(topology: Topology, devices: Sequence[int], num_bytes: float) -> float:
    """Until every device has the ``num_bytes`` of which each had a share, or its share of their sum."""
    if len(devices) < 2:
        return 0.0
    part = num_bytes / len(devices)
    ways = {topology.link_between(*pair) for pair in combinations(devices, 2)}
    return (len(devices) - 1) * max(way.seconds(part) for way in ways)


def all_reduce_seconds(topology: Topology, devices: Sequence[int], num_bytes: float) -> float:
    """Until every device has the sum of what all of them have."""
    return 2 * gather_seconds(topology, devices, num_bytes)
