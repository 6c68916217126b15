"""Seconds that collectives take: in one ring over the slowest link between members, or in rings within rings.

In a ring of r members, each member passes 1/r of the bytes to the next one. A reduce-scatter or an all-gather
does so r - 1 times, an all-reduce twice as often (Patarasuk and Yuan, Bandwidth optimal all-reduce
algorithms, 2009).

Where members are on several hosts, a reduce-scatter may first sum within each host. The k-th members of all
hosts then sum their parts in a ring. An all-gather goes the other way round. All members of a host use its
link at the same time, and together send as many bytes over it as one ring of hosts would.

These are the algorithms that run over gloo. NCCL chooses rings and trees when it starts. Its choice is not
known here; the faster of the two algorithms is taken as an upper bound of its time.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby
from operator import mul

from pipec.hardware.topology import Topology


def unshard_seconds(
    topology: Topology, devices: Sequence[int], num_bytes: float, num_hosts: int = 1
) -> float:
    """Seconds of an all-gather or a reduce-scatter. ``num_bytes`` is the size of the gathered tensor.

    Each of ``num_hosts`` has equally many consecutive devices. With one host there is one ring of all.
    """
    size = len(devices) // num_hosts
    hosts = [devices[first : first + size] for first in range(0, len(devices), size)]
    inside = max(_ring_seconds(topology, host, num_bytes) for host in hosts)
    return inside + max(_ring_seconds(topology, members, num_bytes) for members in zip(*hosts, strict=True))


def all_reduce_seconds(
    topology: Topology, devices: Sequence[int], num_bytes: float, num_hosts: int = 1
) -> float:
    """Seconds of an all-reduce of ``num_bytes``: a reduce-scatter, then an all-gather."""
    return 2 * unshard_seconds(topology, devices, num_bytes, num_hosts)


def fastest_num_hosts(topology: Topology, devices: Sequence[int], num_bytes: float) -> int:
    """The ``num_hosts`` with which a collective is fastest; 1 for one ring.

    The groups of any level can serve as hosts, if each of them has equally many of the devices.
    """
    counts = {1}
    for reach in accumulate((level.size for level in topology.levels), mul):
        sizes = {len(list(group)) for _, group in groupby(device // reach for device in devices)}
        if len(sizes) == 1:
            counts.add(len(devices) // sizes.pop())
    return min(sorted(counts), key=lambda count: unshard_seconds(topology, devices, num_bytes, count))


def _ring_seconds(topology: Topology, devices: Sequence[int], num_bytes: float) -> float:
    if len(devices) < 2:
        return 0.0
    part = num_bytes / len(devices)
    return (len(devices) - 1) * max(level.link.seconds(part) for level in topology.levels_among(devices))
