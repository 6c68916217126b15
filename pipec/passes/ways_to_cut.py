"""Which ways to cut are worth trying: the fastest, then those that leave memory for what is not counted."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from pipec.hardware.topology import Topology, alike
from pipec.passes import Pass
from pipec.passes.cut_stages import CutStages

_SHARES = (1.0, 0.85, 0.7, 0.5)


def ways_to_cut(
    placement: Sequence[int], topology: Topology, in_flight: Mapping[int, tuple[int, ...]]
) -> Iterator[Pass]:
    """The fastest way for stages on these ranks; then, where memory is limited, the fastest within it.

    ``in_flight[size]`` are the microbatches of so many rows that each rank has at once. Ways within memory
    are for the first and for the least size. They leave ever more memory for what the planner does not count:
    values that live inside a function, and copies of what is received. Where a rank has several stages, all
    devices and links are taken to be alike.
    """
    straight = list(placement) == list(range(len(topology.devices)))
    first = next(iter(in_flight))
    yield CutStages(
        topology.without_limits() if straight else alike(len(placement), topology.slowest_link), first
    )
    if straight and topology.least_memory_bytes < math.inf:
        for size, share in product(dict.fromkeys([first, min(in_flight)]), _SHARES):
            yield CutStages(topology.with_memory(share), size, in_flight[size])
