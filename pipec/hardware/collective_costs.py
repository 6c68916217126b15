"""Seconds that collectives take: in one ring over the slowest link between members.

In a ring of r members, each member passes 1/r of the bytes to the next one. A reduce-scatter or an all-gather
does so r - 1 times, an all-reduce twice as often (Patarasuk and Yuan, Bandwidth optimal all-reduce
algorithms, 2009). Gloo runs such a ring. NCCL chooses rings and trees when it starts, which is not known
here: for NCCL, one ring is an upper bound.
"""

from collections.abc import Sequence

from pipec.hardware.topology import Topology


def unshard_seconds(topology: Topology, devices: Sequence[int], num_bytes: float) -> float:
    """Seconds of an all-gather or a reduce-scatter. ``num_bytes`` is the size of the gathered tensor."""
    if len(devices) < 2:
        return 0.0
    part = num_bytes / len(devices)
    return (len(devices) - 1) * max(level.link.seconds(part) for level in topology.levels_among(devices))


def all_reduce_seconds(topology: Topology, devices: Sequence[int], num_bytes: float) -> float:
    """Seconds of an all-reduce of ``num_bytes``: a reduce-scatter, then an all-gather."""
    return 2 * unshard_seconds(topology, devices, num_bytes)
